"""Products of tokens and weights on Hopper: a tile is some tokens and some columns of the result.

Two kinds. The gated product multiplies a tile with the weights of the gate and of the up, which lie
one below the other in shared memory and so are one operand for the tensor cores, and activates the
tile at its end. The product in parts gives the sums over each part of the contracted axis: where
a batch has too few tiles for all multiprocessors, the library's product does the same, and a kernel
of its own to add the parts up, which is left to the reader here.

Persistent programs walk the tiles; a loading warpgroup runs ahead, into the next tile too.
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
from pallas_kernels.mosaic import tiled
from pallas_kernels.products.ring import Ring

GROUP_ROWS = 2048  # tokens whose tiles are walked together, so that they stay in the L2 cache


@dataclass(frozen=True)
class _Static:
    """Everything known when the kernel is traced."""

    tokens: int
    columns: int  # of the result
    inner: int  # the contracted axis
    dtype: Any
    activation: str | None  # of a gated product
    tiles: tuning.ProductTiles

    @property
    def row_tiles(self) -> int:
        """What is past the end is loaded as zeros and not stored."""
        return -(-self.tokens // self.tiles.block_rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.tiles.columns)

    @property
    def weight_rows(self) -> int:
        """Of a tile's weights."""
        return self.tiles.columns * (1 if self.activation is None else 2)

    @property
    def steps(self) -> int:
        """Loads a tile, at most: the last part may have fewer."""
        return -(-self.inner // tuning.PRODUCT_BLOCK // self.tiles.parts)

    @property
    def units(self) -> int:
        return self.row_tiles * self.column_tiles * self.tiles.parts

    @property
    def programs(self) -> int:
        return min(tuning.MULTIPROCESSORS, self.units)


@dataclass(frozen=True)
class _Unit:
    """A tile of one part: first token and column, the part, its first step and its steps."""

    token: jax.Array
    column: jax.Array
    part: jax.Array
    first: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class _Scratch:
    x: Any  # [stages, block_rows, tuning.PRODUCT_BLOCK]
    weight: Any  # [stages, weight_rows, tuning.PRODUCT_BLOCK]: gate, then up
    ring: Ring
    out: Any = None  # [warpgroups, rows, columns] of a gated product


def _unit(static: _Static, round_: jax.Array) -> _Unit:
    """This program's work in a round: part by part, in a part by groups of tokens, tokens first."""
    s = static
    index = lax.axis_index("program") + round_ * s.programs
    part = lax.div(index, jnp.int32(s.row_tiles * s.column_tiles))
    index = index - part * (s.row_tiles * s.column_tiles)
    group = min(s.row_tiles, max(1, GROUP_ROWS // s.tiles.block_rows))
    which = lax.div(index, jnp.int32(group * s.column_tiles))
    place = index - which * (group * s.column_tiles)
    in_column = jnp.minimum(group, s.row_tiles - which * group)  # the last group may be smaller
    row = which * group + lax.rem(place, in_column)
    first = part * s.steps
    steps = jnp.minimum(s.inner // tuning.PRODUCT_BLOCK - first, s.steps)
    column = lax.div(place, in_column) * s.tiles.columns
    return _Unit(row * s.tiles.block_rows, column, part, first, steps)


def _for_each_unit(static: _Static, visit: Any) -> jax.Array:
    """`visit(unit, loads before it)` for each unit of this program; the loads of all."""
    s = static
    left = s.units - lax.axis_index("program")
    rounds = lax.div(left + (s.programs - 1), jnp.int32(s.programs))

    def one(round_, before):
        unit = _unit(s, round_)
        visit(unit, before)
        return before + unit.steps

    return lax.fori_loop(0, rounds, one, jnp.int32(0))


def _load(static: _Static, x: Any, weight: Any, smem: _Scratch) -> None:
    s, t = static, static.tiles

    def visit(unit, before):
        def step(k, _):
            slot = smem.ring.begin(before + k)
            inner = pl.ds((unit.first + k) * tuning.PRODUCT_BLOCK, tuning.PRODUCT_BLOCK)
            full = smem.ring.full.at[slot]
            rows = x.at[pl.ds(unit.token, t.block_rows), inner]
            plgpu.copy_gmem_to_smem(rows, smem.x.at[slot], full)
            for i in range(s.weight_rows // t.columns):
                plgpu.copy_gmem_to_smem(
                    weight.at[i, pl.ds(unit.column, t.columns), inner],
                    smem.weight.at[slot, pl.ds(i * t.columns, t.columns)],
                    full,
                )

        lax.fori_loop(0, unit.steps, step, None)

    smem.ring.drain(_for_each_unit(s, visit))


def activate(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    if activation == "silu":
        doubled = gate
    else:  # gelu's (1 + tanh(z)) / 2 is the logistic function of 2 z
        doubled = (2 * math.sqrt(2 / math.pi)) * (gate + 0.044715 * gate * gate * gate)
    root = lax.rsqrt(1.0 + jnp.exp(-doubled))  # a division takes three times as long
    return gate * up * (root * root)


def _compute(static: _Static, out: Any, smem: _Scratch, warpgroup: jax.Array) -> None:
    s, t = static, static.tiles
    my_rows = pl.ds(warpgroup * t.rows, t.rows)

    def visit(unit, before):
        def products(acc_ref):
            def start(slot, _):
                plgpu.wgmma(
                    acc_ref, smem.x.at[slot, my_rows], smem.weight.at[slot].transpose((1, 0))
                )

            smem.ring.multiply(before, unit.steps, start)
            return acc_ref[...]

        accumulator = plgpu.WGMMAAccumulatorRef((t.rows, s.weight_rows), jnp.float32)
        sums = pl.run_scoped(products, accumulator)
        smem.ring.release(before + unit.steps - 1)
        place = pl.ds(unit.token + warpgroup * t.rows, t.rows), pl.ds(unit.column, t.columns)
        if s.activation is None:
            out.at[unit.part, *place][...] = sums
            return
        result = activate(sums[:, : t.columns], sums[:, t.columns :], s.activation)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[warpgroup][...] = result.astype(s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[warpgroup], out.at[*place])

    _for_each_unit(s, visit)
    if s.activation is not None:
        plgpu.wait_smem_to_gmem(0)


def _run_warpgroup(static: _Static, x: Any, weight: Any, out: Any, *scratch: Any) -> None:
    warpgroups = static.tiles.warpgroups
    warpgroup = lax.axis_index("warpgroup")
    x_ring, weight_ring, full, free, *outs = scratch
    smem = _Scratch(x_ring, weight_ring, Ring(static.tiles.stages, full, free), *outs)

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
    operands, copies = tiled(tuning.PRODUCT_BLOCK), 1 + s.weight_rows // t.columns
    out = plgpu.SMEM((t.warpgroups, t.rows, t.columns), s.dtype, transforms=tiled(t.columns))
    return [
        plgpu.SMEM((t.stages, t.block_rows, tuning.PRODUCT_BLOCK), s.dtype, transforms=operands),
        plgpu.SMEM((t.stages, s.weight_rows, tuning.PRODUCT_BLOCK), s.dtype, transforms=operands),
        plgpu.Barrier(num_arrivals=copies, num_barriers=t.stages),
        plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages),
        *([] if s.activation is None else [out]),
    ]


def _call(static: _Static, name: str, x: jax.Array, weight: jax.Array, out_type: Any) -> jax.Array:
    def kernel(*refs):
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, *refs, *scratch),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    kernel.__name__ = name  # a profile shows it
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(static.programs,),
        grid_names=("program",),
        num_threads=static.tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(x, weight)


def gated_product_kernel(
    x: Float[Array, "tokens embed"], weight: Float[Array, "two ffn embed"], *, activation: str
) -> Float[Array, "tokens ffn"]:
    """The op's contract for what `tuning.supports_gated_product` allows."""
    tokens, embed = x.shape
    ffn = weight.shape[1]
    tiles = tuning.gated_product_tiles(tokens, ffn)
    static = _Static(tokens, ffn, embed, x.dtype, activation, tiles)
    out_type = jax.ShapeDtypeStruct((tokens, ffn), x.dtype)
    return _call(static, "gated_product", x, weight, out_type)


def product_in_parts_kernel(
    x: Float[Array, "tokens inner"], weight: Float[Array, "columns inner"]
) -> Float[Array, "parts rows columns"]:
    """The op's contract for what `tuning.part_tiles` has tiles for."""
    tokens, inner = x.shape
    tiles = tuning.part_tiles(tokens, len(weight), inner, x.dtype)
    assert tiles is not None
    static = _Static(tokens, len(weight), inner, x.dtype, None, tiles)
    rows = static.row_tiles * tiles.block_rows  # those past the tokens are zeros
    out_type = jax.ShapeDtypeStruct((tiles.parts, rows, len(weight)), jnp.float32)
    return _call(static, "product_in_parts", x, weight[None], out_type)
