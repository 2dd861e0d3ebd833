"""What the Mosaic GPU attention kernels share: logits, the running softmax, and page places."""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.spec import AttentionSpec

MASKED = -1e30  # below every log2 logit, and finite: MASKED - MASKED is 0 and not NaN
# A logit without a weight, before it is scaled. With a finite one, a row that sees nothing of its
# first tile fails: the product with the scale is rounded for the peak and not in the fused multiply
# and subtract, so that the weight is 2 to what the rounding left of 1e30, either 0 or infinite.
HIDDEN = -math.inf
MASS_COLUMNS = 8  # in which the mixed kernel keeps a row's sum of weights, as threads hold them
LOG2_E = math.log2(math.e)
WARPGROUP_ROWS = 64  # wgmma's M
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a WGMMA tile
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def compiler_params(*, auto_barriers: bool) -> plgpu.CompilerParams:
    """Warps that reduce across each other bring their own scratch, so the compiler's is small.

    Automatic barriers stop a warpgroup round each copy and store. A kernel may leave them out if
    its own waits and commits order all that its warps share.
    """
    return plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=not auto_barriers
    )


def fence_copy_engine() -> None:
    """Order this thread's ordinary accesses with the copy engine's, in global memory too."""

    def fence(_context: Any) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_)

    inlined: Any = plgpu.inline_mgpu()(fence)
    inlined()


def across_columns(x: jax.Array, columns: int) -> jax.Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def across_rows(x: jax.Array, rows: int) -> jax.Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def row_iota() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS)


def filled(value: float, shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)


def log2_weights(products: jax.Array, spec: AttentionSpec) -> jax.Array:
    """q . k -> the logit in units of log 2."""
    if spec.soft_cap is None:
        return products * (spec.scale * LOG2_E)
    return jnp.tanh(products * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2_E)


def raw_logits(products: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, float]:
    """q . k -> logits, and what makes units of log 2 of them, over 0: so their order is kept."""
    if spec.soft_cap is not None:
        return jnp.tanh(products * (spec.scale / spec.soft_cap)), spec.soft_cap * LOG2_E
    if spec.scale > 0:
        return products, spec.scale * LOG2_E
    return products * (spec.scale * LOG2_E), 1.0


def weigh(
    logits: jax.Array, unit: float, peak: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The new peak, what the old one's weights shrink by, and the logits' weights."""
    new_peak = jnp.maximum(peak, logits.max(axis=1) * unit)
    weights = jnp.exp2(logits * unit - across_columns(new_peak, logits.shape[1]))
    return new_peak, jnp.exp2(peak - new_peak), weights


def add_mass(mass: jax.Array, shrink: jax.Array, weights: jax.Array) -> jax.Array:
    """[rows, MASS_COLUMNS] of sums of weights, with a tile's: no thread needs what others hold."""
    rows, columns = weights.shape
    starts = range(0, columns, MASS_COLUMNS)
    sums = [lax.slice(weights, (0, at), (rows, at + MASS_COLUMNS)) for at in starts]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return mass * across_columns(shrink, MASS_COLUMNS) + sums[0]


def multiply(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a @ b on the tensor cores, waited for."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(acc: jax.Array, a: Any, b: Any) -> jax.Array:
    """acc + a @ b, waited for."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, a, b)

    summed: Any = pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))
    return summed


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


def pages_of_tile(
    table_row: Any,
    tile: jax.Array,
    page_range: tuple[jax.Array, jax.Array],
    *,
    block_kv: int,
    page_size: int,
) -> list[jax.Array]:
    """The page of each copy of tile number `tile`.

    Copies outside `page_range` (first, last) take the nearest page inside, since the table may
    hold anything there.
    """
    copies, _ = copies_of_tile(block_kv, page_size)
    first, last = page_range
    if page_size > block_kv:
        place = tile * block_kv
        return [table_row[jnp.clip(lax.div(place, jnp.int32(page_size)), first, last)]]
    return [table_row[jnp.clip(tile * copies + i, first, last)] for i in range(copies)]


def offset_in_page(tile: jax.Array, *, block_kv: int, page_size: int) -> jax.Array | int:
    """First row of tile number `tile` in its page, where pages are larger than tiles; else 0."""
    if page_size <= block_kv:
        return 0
    return lax.rem(tile * block_kv, jnp.int32(page_size))


def sink_rows(sinks: jax.Array | None, kv_heads: int, group: int) -> list[jax.Array]:
    """The kernels' argument for sinks, if any: log2 logits, f32[kv_heads, WARPGROUP_ROWS].

    Row r belongs to head r % group of the KV head.
    """
    if sinks is None:
        return []
    of_group = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, MASKED).reshape(kv_heads, group)
    return [jnp.tile(of_group, (1, -(-WARPGROUP_ROWS // group)))[:, :WARPGROUP_ROWS]]


def fill_sinks(has_sinks: bool, refs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rest of a kernel's arrays, from sinks on, with None where sinks would be."""
    return refs if has_sinks else (None, *refs)
