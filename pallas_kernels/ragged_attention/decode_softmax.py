"""The decode kernel's running softmax, with tokens as rows and the heads of a group as columns."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import inline
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.decode_plan import DecodeStatic

type Pieces = tuple[jax.Array, ...]
"""Values of a group's heads, head_dim being the rows: [piece, part_rows] for each of the pieces."""

type Softmax = tuple[Pieces, jax.Array, jax.Array]
"""Weighted values; largest log2 weight so far [part_rows]; weights [block_kv, part_rows], summed
over the tiles but not yet over a tile's tokens, which other threads and warps hold."""


def turned(ref: Any) -> Any:
    return ref.transpose((1, 0))


def store_turned(ref: Any, values: jax.Array) -> None:
    """Store columns of heads, as the tensor cores leave them, as rows of heads."""
    turned(ref)[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def empty_pieces(static: DecodeStatic) -> Pieces:
    return (parts.filled(0.0, (static.piece, static.part_rows)),) * len(static.pieces)


def empty_softmax(static: DecodeStatic) -> Softmax:
    s = static
    peak = plgpu.layout_cast(jnp.full((s.part_rows,), parts.MASKED, jnp.float32), parts.COLUMNS)
    return empty_pieces(s), peak, parts.filled(0.0, (s.tiles.block_kv, s.part_rows))


def shrink_softmax(softmax: Softmax, logits: jax.Array, scratch: Any) -> tuple[Softmax, jax.Array]:
    """Take in log2 logits: the softmax on its new scale, and the new weights on that scale."""
    acc, peak, mass = softmax
    new_peak = jnp.maximum(peak, _reduced(logits, "max", scratch))
    shrink = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(logits - parts.across_rows(new_peak, logits.shape[0]))
    mass = mass * parts.across_rows(shrink, mass.shape[0]) + weights
    return (_scaled(acc, shrink), new_peak, mass), weights


def finish_softmax(softmax: Softmax, scratch: Any) -> tuple[Pieces, jax.Array]:
    """Averages of the values, and the log2 of the sums of weights [part_rows]."""
    acc, peak, mass = softmax
    mass = _reduced(mass, "add", scratch)
    return _scaled(acc, 1.0 / mass), peak + jnp.log2(mass)


def add_values(static: DecodeStatic, acc: Pieces, *factors: tuple[Any, Any]) -> Pieces:
    """Add V^T P^T of each V [block_kv, head_dim] and P [part_rows, block_kv]; one wait for all."""

    def products(acc_refs):
        for values, weights in factors:
            for piece, acc_ref in zip(static.pieces, acc_refs, strict=True):
                plgpu.wgmma(acc_ref, turned(values.at[:, piece]), turned(weights))

    summed: Any = pl.run_state(products)(tuple(map(plgpu.WGMMAAccumulatorRef.init, acc)))
    return summed


def scratch_size(static: DecodeStatic) -> int:
    """Values in `scratch`: each of 128 threads leaves its columns there, a quarter of all."""
    return 128 * static.part_rows // 4


def _scaled(acc: Pieces, factor: jax.Array) -> Pieces:
    return tuple(piece * parts.across_rows(factor, piece.shape[0]) for piece in acc)


def _reduced(x: jax.Array, op: str, scratch: Any) -> jax.Array:
    """f32[rows, columns] -> [columns]. The compiler's own scratch is shared by all warpgroups."""
    result = plgpu.ShapeDtypeStruct((x.shape[1],), jnp.float32, layout=parts.COLUMNS)

    @inline(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result)
    def reduced(_, x, scratch):
        return x.reduce(op, 0, scratch)

    return reduced(x, scratch)
