"""Where all programs of a launch wait for each other: counters in global memory.

There is one for each meeting and one for those that have left the last. They are zeros before a
launch and after it, so that launches one after the other use the same.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from pallas_kernels import tuning
from pallas_kernels.mosaic import inline

MEETINGS = tuning.ONE_ROW_COUNTERS - 1
EVERYBODY = tuning.MULTIPROCESSORS


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _address(counters: Any, which: int) -> Any:
    return utils.getelementptr(utils.memref_ptr(counters), [which], _i32())


def arrive(counters: Any, which: int) -> None:
    """Tell that this program has stored what the others wait for."""
    plgpu.commit_smem()  # for its barrier: all threads have stored

    @inline(arg_types=(plgpu.RefType(),))
    def told(_, counters):
        utils.SemaphoreRef(_address(counters, which)).signal(1, memory_scope="gpu")

    told(counters)


def wait_for_all(counters: Any, which: int) -> None:
    """Wait until all have arrived."""

    @inline(arg_types=(plgpu.RefType(),))
    def waited(_, counters):
        counter = utils.SemaphoreRef(_address(counters, which))
        counter.wait(EVERYBODY, decrement=False, memory_scope="gpu")

    waited(counters)


def leave(counters: Any) -> None:
    """After the last meeting: the last program to leave makes zeros of all counters."""

    @inline(arg_types=(plgpu.RefType(),))
    def left(_, counters):
        add = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            address = _address(counters, MEETINGS)
            before = llvm.inline_asm(_i32(), [address], add, "=r,l", has_side_effects=True)
            last = arith.cmpi(arith.CmpIPredicate.eq, before, mgpu.c(EVERYBODY - 1, _i32()))
            with utils.when(last):
                for i in range(tuning.ONE_ROW_COUNTERS):
                    llvm.store(mgpu.c(0, _i32()), _address(counters, i))

    left(counters)
