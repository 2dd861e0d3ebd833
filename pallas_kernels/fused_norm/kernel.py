"""Residual addition and RMS norm as one Mosaic GPU kernel: a program a row, all in registers."""

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import gpu
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.mosaic import inline

WARPGROUP = 128  # threads
WARPS = 4  # of a warpgroup
MAX_WARPGROUPS = 8
MAX_VECTORS = 8  # a thread, so that a row stays in registers
MAX_VECTOR = 8  # values of an access: 16 bytes


@dataclass(frozen=True)
class NormTiles:
    """How a row is shared out: `vectors` accesses of `vector` values a thread."""

    warpgroups: int
    vector: int
    vectors: int


def norm_tiles(embed: int) -> NormTiles:
    """Fewest accesses a thread; of equal ones the widest, so the fewest warpgroups."""
    fitting = []
    for warpgroups in range(1, MAX_WARPGROUPS + 1):
        values, rest = divmod(embed, WARPGROUP * warpgroups)
        if rest == 0:
            vector = math.gcd(values, MAX_VECTOR)
            fitting.append(NormTiles(warpgroups, vector, values // vector))
    return min(fitting, key=lambda tiles: (tiles.vectors, tiles.warpgroups))


def supports(embed: int, dtype: DTypeLike) -> bool:
    """Whether the kernel takes rows of this width and type."""
    return (
        tuning.is_16_bit(dtype)
        and embed % WARPGROUP == 0
        and norm_tiles(embed).vectors <= MAX_VECTORS
    )


def _sum_over_program(x: jax.Array, layout: Any, parts: Any) -> jax.Array:
    """The sum of every warpgroup's `x`, in each element of the result.

    One barrier for all: a `jnp.sum` in each warpgroup would cost two more, and the warpgroups
    would share its scratch memory.
    """

    @inline(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def summed(_, x, parts):
        f32, index = ir.F32Type.get(), ir.IndexType.get()
        add = vector.CombiningKind.ADD
        sums = [vector.reduction(f32, add, register) for register in x.registers.flat]
        total = functools.reduce(arith.addf, sums)
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        warp = arith.shrui(mgpu.thread_idx(), mgpu.c(5, ir.IntegerType.get_signless(32)))
        memref.store(total, parts, [arith.index_cast(index, warp)])
        gpu.barrier()
        warps = parts.type.shape[0]
        sums = [memref.load(parts, [mgpu.c(i, index)]) for i in range(warps)]
        total = functools.reduce(arith.addf, sums)
        return mgpu.FragmentedArray.splat(total, x.shape, layout=x.layout)

    return summed(x, parts)


def _add_rms_norm(
    x: Any,
    residual: Any,
    scale: Any,
    normed: Any,
    total: Any,
    parts: Any,
    *,
    eps: float,
    tiles: NormTiles,
) -> None:
    # each warpgroup holds one stretch of the row
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    embed = residual.shape[1]
    width = embed // tiles.warpgroups
    stretch = pl.ds(warpgroup * width, width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=tiles.vector)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    if len(x.shape) == 2:
        addends = [load(x.at[row, stretch])]
    else:
        addends = [load(x.at[part, row, stretch]) for part in range(x.shape[0])]
    before, factor = load(residual.at[row, stretch]), load(scale.at[stretch])
    added = functools.reduce(operator.add, addends).astype(before.dtype)
    rounded = before + added
    total.at[row, stretch][...] = rounded
    wide = rounded.astype(jnp.float32)
    squares = _sum_over_program(wide * wide, layout, parts)
    inverse = lax.rsqrt(squares * (1.0 / embed) + eps)
    normed.at[row, stretch][...] = (wide * inverse * factor).astype(before.dtype)


def add_rms_norm_kernel(
    x: Float[Array, "rows embed"] | Float[Array, "parts padded embed"],
    residual: Float[Array, "rows embed"],
    scale: Float[Array, " embed"],
    *,
    eps: float,
) -> tuple[Float[Array, "rows embed"], Float[Array, "rows embed"]]:
    """The op's contract for what `supports` allows."""
    rows, embed = residual.shape
    tiles = norm_tiles(embed)

    @functools.wraps(_add_rms_norm)
    def body(*refs):
        _add_rms_norm(*refs, eps=eps, tiles=tiles)

    like_residual = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    return plgpu.kernel(
        body,
        out_type=(like_residual, like_residual),
        scratch_types=[plgpu.SMEM((tiles.warpgroups * WARPS,), jnp.float32)],
        grid=(rows,),
        grid_names=("row",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(x, residual, scale)
