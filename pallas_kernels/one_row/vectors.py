"""A row of values spread over a warpgroup: eight neighbours a thread, then the next 1024."""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels import tuning
from pallas_kernels.mosaic import inline, tiled
from pallas_kernels.ragged_attention import kernel_parts

VECTOR = 8
ROUND = VECTOR * 128  # values of all threads
SCALAR = plgpu.Layout.WG_SPLAT(())


def _padded(width: int) -> int:
    """To whole rounds, whose last is filled with zeros."""
    return -(-width // ROUND) * ROUND


def _layout(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((_padded(width),), vec_size=VECTOR)


def _number(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _places(width: int) -> list[tuple[Any, Any]]:
    """(column, whether it is inside) of each vector of this thread; outside the last ones again."""
    thread = arith.remui(mgpu.thread_idx(), _number(128))
    places = []
    for round_ in range(_padded(width) // ROUND):
        item = arith.addi(thread, _number(round_ * 128))
        inside = arith.cmpi(arith.CmpIPredicate.ult, item, _number(width // VECTOR))
        item = arith.minui(item, _number(width // VECTOR - 1))
        places.append((arith.muli(item, _number(VECTOR)), inside))
    return places


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def load(ref: Any, row: int, start: jax.Array, width: int) -> jax.Array:
    """`ref[row, start : start + width]`, ordinary loads from global memory."""
    layout, size = _layout(width), _padded(width)

    @inline(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((size,), ref.dtype, layout=layout),
    )
    def loaded(_, ref, start):
        kind = ir.VectorType.get((VECTOR,), ref.type.element_type)
        zeros = vector.broadcast(kind, mgpu.c(0.0, ref.type.element_type))
        registers = np.empty(layout.to_mgpu().registers_shape((size,)), dtype=object)
        for i, (column, inside) in enumerate(_places(width)):
            at = _index(arith.addi(column, start.registers.item()))
            values = vector.load(kind, ref, [mgpu.c(row, ir.IndexType.get()), at])
            registers[i] = arith.select(inside, values, zeros)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return loaded(ref, start)


def store(values: jax.Array, ref: Any, width: int) -> None:
    """`ref[0, :width] = values`."""

    @inline(arg_types=(plgpu.RefType(), _layout(width)))
    def stored(_, ref, values):
        zero = mgpu.c(0, ir.IndexType.get())
        for register, (column, inside) in zip(values.registers.flat, _places(width), strict=True):
            with utils.when(inside):
                vector.store(register, ref, [zero, _index(column)])

    stored(ref, values)


def store_operand(values: jax.Array, ref: Any, width: int, first: jax.Array, blocks: int) -> None:
    """So many blocks of the row from block `first` on, as rows of `ref`, [groups, 8, block].

    The tensor cores find the eighths of a row of 128 bytes in an order that the row's number says.
    """
    block = tuning.PRODUCT_BLOCK

    @inline(arg_types=(plgpu.RefType(tiled(block)), _layout(width), SCALAR))
    def stored(_, ref, values, first):
        zero = mgpu.c(0, ir.IndexType.get())
        for register, (column, inside) in zip(values.registers.flat, _places(width), strict=True):
            which = arith.subi(arith.divui(column, _number(block)), first.registers.item())
            is_mine = arith.cmpi(arith.CmpIPredicate.ult, which, _number(blocks))
            group, row = arith.divui(which, _number(8)), arith.remui(which, _number(8))
            eighth = arith.divui(arith.remui(column, _number(block)), _number(VECTOR))
            place = arith.muli(arith.xori(eighth, row), _number(VECTOR))
            with utils.when(arith.andi(inside, is_mine)):
                where = [_index(group), zero, zero, _index(row), _index(place)]
                vector.store(register, ref, where)

    stored(ref, values, first)


def row_sums(sums: tuple[jax.Array, ...]) -> jax.Array:
    """The first column of the first, the second of the second and so on, added up."""
    column = kernel_parts.iota(sums[0].shape, 1)
    mine = [jnp.where(column == i, one, 0.0) for i, one in enumerate(sums)]
    return functools.reduce(operator.add, mine).sum(axis=1)
