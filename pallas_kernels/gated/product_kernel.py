"""The gated product on Hopper: both products of a tile side by side, the activation at its end.

A tile is some tokens and some columns of the result. Its weights are as many rows of the gate's and
of the up's, which lie one below the other in shared memory and so are one operand for the tensor
cores. Persistent programs walk the tiles; a loading warpgroup runs ahead, into the next tile too.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.ragged_attention.kernel_parts import tiled

GROUP_ROWS = 2048  # tokens whose tiles are walked together, so that they stay in the L2 cache


@dataclass(frozen=True)
class _Static:
    """Everything known when the kernel is traced."""

    tokens: int
    ffn: int
    embed: int
    dtype: Any
    activation: str
    tiles: tuning.ProductTiles

    @property
    def row_tiles(self) -> int:
        """What is past the end is loaded as zeros and not stored."""
        return -(-self.tokens // self.tiles.block_rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.ffn // self.tiles.columns)

    @property
    def steps(self) -> int:
        return self.embed // tuning.PRODUCT_BLOCK

    @property
    def programs(self) -> int:
        return min(tuning.MULTIPROCESSORS, self.row_tiles * self.column_tiles)


@dataclass(frozen=True)
class _Scratch:
    x: Any  # [stages, block_rows, tuning.PRODUCT_BLOCK]
    weight: Any  # [stages, 2 * columns, tuning.PRODUCT_BLOCK]: gate, then up
    out: Any  # [warpgroups, rows, columns]
    full: Any
    free: Any


def _tile_start(static: _Static, round_: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First token and first column of this program's tile, in groups of tokens, tokens first."""
    s = static
    index = lax.axis_index("program") + round_ * s.programs
    group = min(s.row_tiles, max(1, GROUP_ROWS // s.tiles.block_rows))
    which = lax.div(index, jnp.int32(group * s.column_tiles))
    place = index - which * (group * s.column_tiles)
    in_column = jnp.minimum(group, s.row_tiles - which * group)  # the last group may be smaller
    row = which * group + lax.rem(place, in_column)
    return row * s.tiles.block_rows, lax.div(place, in_column) * s.tiles.columns


def _for_each_tile(static: _Static, visit: Any) -> jax.Array:
    """`visit(first token, first column, loads before it)` for each tile; the loads of all."""
    s = static
    left = s.row_tiles * s.column_tiles - lax.axis_index("program")
    rounds = lax.div(left + (s.programs - 1), jnp.int32(s.programs))

    def one(round_, _):
        visit(*_tile_start(s, round_), round_ * s.steps)

    lax.fori_loop(0, rounds, one, None)
    return rounds * s.steps


def _load(static: _Static, x: Any, weight: Any, smem: _Scratch) -> None:
    s, t = static, static.tiles
    stages = jnp.int32(t.stages)

    def visit(token, column, before):
        def step(k, _):
            slot = lax.rem(before + k, stages)
            pl.when(before + k >= stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            inner = pl.ds(k * tuning.PRODUCT_BLOCK, tuning.PRODUCT_BLOCK)
            full = smem.full.at[slot]
            rows = x.at[pl.ds(token, t.block_rows), inner]
            plgpu.copy_gmem_to_smem(rows, smem.x.at[slot], full)
            for part in range(2):
                plgpu.copy_gmem_to_smem(
                    weight.at[part, pl.ds(column, t.columns), inner],
                    smem.weight.at[slot, pl.ds(part * t.columns, t.columns)],
                    full,
                )

        lax.fori_loop(0, s.steps, step, None)

    loads = _for_each_tile(s, visit)

    def drain(i, _):
        plgpu.barrier_wait(smem.free.at[lax.rem(i, stages)])

    # else a barrier would be left before it is told
    lax.fori_loop(jnp.maximum(loads - t.stages, 0), loads, drain, None)


def _activate(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    if activation == "silu":
        doubled = gate
    else:  # gelu's (1 + tanh(z)) / 2 is the logistic function of 2 z
        doubled = (2 * math.sqrt(2 / math.pi)) * (gate + 0.044715 * gate * gate * gate)
    root = lax.rsqrt(1.0 + jnp.exp(-doubled))  # a division takes three times as long
    return gate * up * (root * root)


def _compute(static: _Static, out: Any, smem: _Scratch, warpgroup: jax.Array) -> None:
    s, t = static, static.tiles
    stages = jnp.int32(t.stages)
    my_rows = pl.ds(warpgroup * t.rows, t.rows)

    def visit(token, column, before):
        def products(acc_ref):
            def multiply(k):
                slot = lax.rem(before + k, stages)
                plgpu.barrier_wait(smem.full.at[slot])
                plgpu.wgmma(
                    acc_ref, smem.x.at[slot, my_rows], smem.weight.at[slot].transpose((1, 0))
                )

            def step(k, _):
                multiply(k)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(smem.free.at[lax.rem(before + k - 1, stages)])

            multiply(jnp.int32(0))
            lax.fori_loop(1, s.steps, step, None)
            return acc_ref[...]

        both = pl.run_scoped(
            products, plgpu.WGMMAAccumulatorRef((t.rows, 2 * t.columns), jnp.float32)
        )
        plgpu.barrier_arrive(smem.free.at[lax.rem(before + s.steps - 1, stages)])
        result = _activate(both[:, : t.columns], both[:, t.columns :], s.activation)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[warpgroup][...] = result.astype(s.dtype)
        plgpu.commit_smem()
        place = pl.ds(token + warpgroup * t.rows, t.rows), pl.ds(column, t.columns)
        plgpu.copy_smem_to_gmem(smem.out.at[warpgroup], out.at[*place])

    _for_each_tile(s, visit)
    plgpu.wait_smem_to_gmem(0)


def _run_warpgroup(static: _Static, x: Any, weight: Any, out: Any, *scratch: Any) -> None:
    warpgroups = static.tiles.warpgroups
    warpgroup = lax.axis_index("warpgroup")
    make_scratch: Any = _Scratch
    smem = make_scratch(*scratch)

    @pl.when(warpgroup < warpgroups)
    def _():
        plgpu.set_max_registers(min(240, (512 - 24) // warpgroups // 8 * 8), action="increase")
        _compute(static, out, smem, warpgroup)

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _load(static, x, weight, smem)


def _scratch_types(static: _Static) -> list[Any]:
    s, t = static, static.tiles
    operands = tiled(tuning.PRODUCT_BLOCK)
    return [
        plgpu.SMEM((t.stages, t.block_rows, tuning.PRODUCT_BLOCK), s.dtype, transforms=operands),
        plgpu.SMEM((t.stages, 2 * t.columns, tuning.PRODUCT_BLOCK), s.dtype, transforms=operands),
        plgpu.SMEM((t.warpgroups, t.rows, t.columns), s.dtype, transforms=tiled(t.columns)),
        plgpu.Barrier(num_arrivals=3, num_barriers=t.stages),
        plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages),
    ]


def gated_product_kernel(
    x: Float[Array, "tokens embed"], weight: Float[Array, "two ffn embed"], *, activation: str
) -> Float[Array, "tokens ffn"]:
    """The op's contract for what `tuning.supports_product` allows."""
    tokens, embed = x.shape
    ffn = weight.shape[1]
    tiles = tuning.product_tiles(tokens, ffn)
    static = _Static(tokens, ffn, embed, x.dtype, activation, tiles)

    def gated_product(*refs):
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, *refs, *scratch),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        gated_product,
        out_type=jax.ShapeDtypeStruct((tokens, ffn), x.dtype),
        grid=(static.programs,),
        grid_names=("program",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(x, weight)
