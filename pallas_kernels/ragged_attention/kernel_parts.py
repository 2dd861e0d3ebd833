"""What the Mosaic GPU attention kernels share: logits, the running softmax, and page places."""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.spec import AttentionSpec

MASKED = -1e30  # finite, so that MASKED - MASKED is 0 and not NaN
LOG2_E = math.log2(math.e)
WARPGROUP_ROWS = 64  # wgmma's M
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a WGMMA tile
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# rows are reduced inside a warp: no scratch between warps is needed
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512)

type Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Weighted values [rows, head_dim], largest log2 weight so far [rows], sum of weights [rows]."""


def across_columns(x: jax.Array, columns: int) -> jax.Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def across_rows(x: jax.Array, rows: int) -> jax.Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def filled_rows(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), ROWS)


def empty_softmax(head_dim: int) -> Softmax:
    acc = jnp.zeros((WARPGROUP_ROWS, head_dim), jnp.float32)
    return plgpu.layout_cast(acc, plgpu.Layout.WGMMA), filled_rows(MASKED), filled_rows(0.0)


def log2_weights(products: jax.Array, spec: AttentionSpec) -> jax.Array:
    """q . k -> the logit in units of log 2."""
    if spec.soft_cap is None:
        return products * (spec.scale * LOG2_E)
    return jnp.tanh(products * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2_E)


def shrink_softmax(softmax: Softmax, logits: jax.Array) -> tuple[Softmax, jax.Array]:
    """Take in log2 logits: the softmax on its new scale, and the new weights on that scale."""
    acc, peak, mass = softmax
    new_peak = jnp.maximum(peak, logits.max(axis=1))
    shrink = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(logits - across_columns(new_peak, logits.shape[1]))
    acc = acc * across_columns(shrink, acc.shape[1])
    return (acc, new_peak, mass * shrink + weights.sum(axis=1)), weights


def multiply(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a @ b on the tensor cores, waited for."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def add_products(acc: jax.Array, *factors: tuple[jax.Array, Any]) -> jax.Array:
    """acc + a1 @ b1 + a2 @ b2 ..., waited for."""

    def products(acc_ref):
        for a, b in factors:
            plgpu.wgmma(acc_ref, a, b)

    return pl.run_state(products)(plgpu.ACC.init(acc))


def zero_rows_outside(tile_ref: Any, low: jax.Array, high: jax.Array) -> None:
    """Zero the rows of a shared-memory tile that are not in [low, high): 0 * NaN is NaN."""
    tile = plgpu.load(tile_ref, layout=plgpu.Layout.WGMMA)
    row = iota(tile.shape, 0)
    tile_ref[...] = jnp.where((row >= low) & (row < high), tile, jnp.zeros_like(tile))
    plgpu.commit_smem()


def first_visible(kv_len: jax.Array, spec: AttentionSpec) -> jax.Array:
    """First position that the row's last query sees."""
    if spec.window is None:
        return jnp.zeros_like(kv_len)
    return jnp.maximum(kv_len - spec.window, 0)


def copies_of_tile(block_kv: int, page_size: int) -> tuple[int, int]:
    """(copies a tile, tokens a copy): a page a copy, or a tile where pages are larger."""
    rows = min(block_kv, page_size)
    return block_kv // rows, rows


def page_places(
    table_row: Any,
    tile: jax.Array,
    page_range: tuple[jax.Array, jax.Array],
    *,
    block_kv: int,
    page_size: int,
) -> list[tuple[jax.Array, jax.Array | int]]:
    """Page and first row in it of each copy of tile number `tile`.

    Copies outside `page_range` (first, last) take the nearest page inside, since the table may
    hold anything there.
    """
    copies, rows = copies_of_tile(block_kv, page_size)
    first, last = page_range
    if page_size > block_kv:
        place = tile * block_kv
        page, offset = lax.div(place, jnp.int32(page_size)), lax.rem(place, jnp.int32(page_size))
        return [(table_row[jnp.clip(page, first, last)], pl.multiple_of(offset, block_kv))]
    return [(table_row[jnp.clip(tile * copies + i, first, last)], 0) for i in range(copies)]


def sink_rows(sinks: jax.Array | None, kv_heads: int, group: int) -> jax.Array:
    """Sinks as log2 logits of a warpgroup's rows, f32[kv_heads, WARPGROUP_ROWS].

    Row r belongs to head r % group of the KV head. Zeros without sinks.
    """
    if sinks is None:
        return jnp.zeros((kv_heads, WARPGROUP_ROWS), jnp.float32)
    of_group = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, MASKED).reshape(kv_heads, group)
    return jnp.tile(of_group, (1, -(-WARPGROUP_ROWS // group)))[:, :WARPGROUP_ROWS]
