"""What the parts of the sampler's kernel share: numbers in registers, and the kernel's sizes."""

import math
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from pallas_kernels.tuning import SearchTiles

WARPGROUP, WARP = 128, 32  # threads
SAMPLE = 256  # logits of a row that are ranked first
SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclass(frozen=True)
class SearchStatic:
    vocab: int
    tiles: SearchTiles

    @property
    def threads(self) -> int:
        return self.tiles.warpgroups * WARPGROUP

    @property
    def vector(self) -> int:
        """Values of an access; every row must begin at a multiple of its bytes."""
        return math.gcd(self.vocab, 4)

    @property
    def parts(self) -> int:
        """Threads that share the ranking of a logit."""
        return self.threads // SAMPLE


def f32(value: float) -> Any:
    return mgpu.c(value, ir.F32Type.get())


def i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def as_index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def as_scalar(value: Any) -> mgpu.FragmentedArray:
    is_signed = True if isinstance(value.type, ir.IntegerType) else None
    return mgpu.FragmentedArray.splat(value, (), is_signed=is_signed)


def register_of(value: mgpu.FragmentedArray) -> Any:
    return value.registers.item()


def scalar_of(dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((), dtype, layout=SCALAR)


def as_number(relation: str, x: Any, y: Any) -> Any:
    """1 where the relation holds, else 0, as a float: one instruction, and NaN gives 0."""
    text = f"set.{relation}.f32.f32 $0, $1, $2;"
    return llvm.inline_asm(ir.F32Type.get(), [x, y], text, "=f,f,f")


def compared(relation: str, x: Any, y: Any) -> Any:
    return arith.cmpf(getattr(arith.CmpFPredicate, relation), x, y)


def loop(bound: Any, step: Any, carry: list[Any]) -> list[Any]:
    """Run `step(i, *carry)` for i from 0 to below `bound`."""

    @mgpu.fori(bound, carry)
    def run(i, carry):
        return step(i, carry)

    return list(run.results)
