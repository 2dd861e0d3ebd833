"""Products of few tokens with weights on Hopper, in parts, at the speed at which weights are read.

Rows of weights are the 64 rows of the tensor cores' products and the tokens are the columns, a
multiple of eight. A unit of work is a tile of columns of the result over a part of the contracted
axis; a loading warpgroup runs through all units of its program without a pause, another multiplies.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.mosaic import tiled
from pallas_kernels.products.ring import Ring

BLOCK = tuning.PRODUCT_BLOCK
COLUMNS = tuning.THIN_COLUMNS  # of the result, a unit


@dataclass(frozen=True)
class _Static:
    """Everything known when the kernel is traced."""

    tokens: int
    columns: int  # of the result: rows of weights
    inner: int  # the contracted axis
    dtype: Any
    tiles: tuning.ThinTiles

    @property
    def column_tiles(self) -> int:
        return self.columns // COLUMNS

    @property
    def steps(self) -> int:
        """Loads a unit."""
        return self.inner // BLOCK // self.tiles.parts

    @property
    def units(self) -> int:
        return self.column_tiles * self.tiles.parts

    @property
    def programs(self) -> int:
        return min(tuning.MULTIPROCESSORS, self.units)


@dataclass(frozen=True)
class _Scratch:
    x: Any  # [stages, tokens, BLOCK]
    weight: Any  # [stages, COLUMNS, BLOCK]
    out: Any  # [tokens, COLUMNS]
    ring: Ring


def _for_each_unit(static: _Static, visit: Any) -> jax.Array:
    """`visit(first column, part, loads before it)` for each unit of this program; its loads."""
    s, program = static, lax.axis_index("program")
    rounds = lax.div(s.units - program + (s.programs - 1), jnp.int32(s.programs))

    def one(round_, _):
        index = program + round_ * s.programs
        part = lax.div(index, jnp.int32(s.column_tiles))
        column = (index - part * s.column_tiles) * COLUMNS
        visit(column, part, round_ * s.steps)

    lax.fori_loop(0, rounds, one, None)
    return rounds * s.steps


def _load(static: _Static, x: Any, weight: Any, smem: _Scratch) -> None:
    s = static

    def visit(column, part, before):
        def step(k, _):
            slot = smem.ring.begin(before + k)
            inner, full = pl.ds((part * s.steps + k) * BLOCK, BLOCK), smem.ring.full.at[slot]
            rows = weight.at[pl.ds(column, COLUMNS), inner]
            plgpu.copy_gmem_to_smem(rows, smem.weight.at[slot], full)
            plgpu.copy_gmem_to_smem(x.at[:, inner], smem.x.at[slot], full)

        lax.fori_loop(0, s.steps, step, None)

    smem.ring.drain(_for_each_unit(s, visit))


def _compute(static: _Static, out: Any, smem: _Scratch) -> None:
    s = static

    def visit(column, part, before):
        def products(acc_ref):
            def start(slot, _):
                plgpu.wgmma(acc_ref, smem.weight.at[slot], smem.x.at[slot].transpose((1, 0)))

            smem.ring.multiply(before, s.steps, start)
            return acc_ref[...]

        accumulator = plgpu.WGMMAAccumulatorRef((COLUMNS, s.tokens), jnp.float32)
        sums = pl.run_scoped(products, accumulator)
        smem.ring.release(before + s.steps - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        turned = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)
        smem.out.transpose((1, 0))[...] = turned
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out, out.at[part, :, pl.ds(column, COLUMNS)])

    _for_each_unit(s, visit)
    plgpu.wait_smem_to_gmem(0)


def _run_warpgroup(static: _Static, x: Any, weight: Any, out: Any, *scratch: Any) -> None:
    warpgroup = lax.axis_index("warpgroup")
    x_ring, weight_ring, out_smem, full, free = scratch
    smem = _Scratch(x_ring, weight_ring, out_smem, Ring(static.tiles.stages, full, free))
    pl.when(warpgroup == 0)(lambda: _compute(static, out, smem))
    pl.when(warpgroup == 1)(lambda: _load(static, x, weight, smem))


def _scratch_types(static: _Static) -> list[Any]:
    s, stages, operands = static, static.tiles.stages, tiled(BLOCK)
    return [
        plgpu.SMEM((stages, s.tokens, BLOCK), s.dtype, transforms=operands),
        plgpu.SMEM((stages, COLUMNS, BLOCK), s.dtype, transforms=operands),
        plgpu.SMEM((s.tokens, COLUMNS), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    ]


def thin_product_in_parts_kernel(
    x: Float[Array, "tokens inner"], weight: Float[Array, "columns inner"]
) -> Float[Array, "parts rows columns"]:
    """The contract of `product_in_parts` for what `tuning.thin_tiles` has tiles for."""
    tokens, inner = x.shape
    tiles = tuning.thin_tiles(tokens, len(weight), inner, x.dtype)
    assert tiles is not None
    static = _Static(tokens, len(weight), inner, x.dtype, tiles)

    def thin_product_in_parts(*refs):
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, *refs, *scratch),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    shape = (tiles.parts, static.tokens, static.columns)
    return plgpu.kernel(
        thin_product_in_parts,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(static.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(x, weight)
