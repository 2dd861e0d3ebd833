"""What the parts of the sampler's kernel share: shapes, and words for single numbers in registers.

Every thread works on its own numbers here, which to Mosaic are scalars of its warpgroup.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import llvm

from pallas_kernels.tuning import SearchTiles

WARPGROUP, WARP = 128, 32  # threads
SCALAR = plgpu.Layout.WG_SPLAT(())
inline: Any = plgpu.inline_mgpu  # what it returns takes no context, which type checkers miss


@dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    vocab: int
    tiles: SearchTiles

    @property
    def threads(self) -> int:
        return self.tiles.warpgroups * WARPGROUP

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def vector(self) -> int:
        """Values of an access; every row must begin at a multiple of its bytes."""
        return math.gcd(self.vocab, 4)

    @property
    def room(self) -> int:
        """Logits that all threads together can hold."""
        return self.tiles.held * self.threads


def f32(value: float) -> Any:
    return mgpu.c(value, ir.F32Type.get())


def i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def const_index(value: int) -> Any:
    return mgpu.c(value, ir.IndexType.get())


def scalar(value: Any) -> mgpu.FragmentedArray:
    is_signed = True if isinstance(value.type, ir.IntegerType) else None
    return mgpu.FragmentedArray.splat(value, (), is_signed=is_signed)


def register(value: mgpu.FragmentedArray) -> Any:
    return value.registers.item()


def of_type(dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((), dtype, layout=SCALAR)


def set_where(relation: str, x: Any, y: Any) -> Any:
    """1 where the relation holds, else 0, as a float: one instruction, and NaN gives 0."""
    text = f"set.{relation}.f32.f32 $0, $1, $2;"
    return llvm.inline_asm(ir.F32Type.get(), [x, y], text, "=f,f,f")


def compare(relation: str, x: Any, y: Any) -> Any:
    return arith.cmpf(getattr(arith.CmpFPredicate, relation), x, y)


def repeat(bound: Any, step: Any, carry: list[Any]) -> list[Any]:
    """Run `step(i, *carry)` for i from 0 to below `bound`."""

    @mgpu.fori(bound, carry)
    def loop(i, carry):
        return step(i, carry)

    return list(loop.results)


def either(
    condition: Any, yes: Callable[[], list[Any]], no: Callable[[], list[Any]], types: list[Any]
) -> list[Any]:
    """What `yes` or `no` gives, values of `types`; only that one is run."""
    branch: Any = scf.IfOp(condition, types, has_else=True)
    for block, make in ((branch.then_block, yes), (branch.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)
