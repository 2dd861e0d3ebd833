"""How the sampler's kernel looks at a row: all of it, or what its threads hold of it."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector
from jaxlib.mlir.dialects import gpu, llvm

from pallas_kernels.mosaic import inline
from pallas_kernels.sampling.kernel_parts import (
    SCALAR,
    WARP,
    SearchStatic,
    as_index,
    as_number,
    as_scalar,
    compared,
    f32,
    i32,
    loop,
    register_of,
    scalar_of,
)
from pallas_kernels.sampling.row_search import LOWEST, MAX_EXPONENT, TRIES, Look, Seen

SUMS = 1 + TRIES  # of a look: the total and from each try on
REDUCED = SUMS + 3  # and the lowest, the highest, the most that a thread holds


def _either(condition: Any, yes: Callable[[], list[Any]], no: Callable[[], list[Any]]) -> list[Any]:
    types = [*[ir.F32Type.get()] * (REDUCED - 1), ir.IntegerType.get_signless(32)]
    branch: Any = scf.IfOp(condition, types, has_else=True)
    for block, make in ((branch.then_block, yes), (branch.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)


@dataclass(frozen=True)
class _Gaze:
    """A look's numbers in registers."""

    low: Any
    high: Any
    hold_from: Any
    reference: Any
    scale: Any
    tries: list[Any]
    by_mass: Any
    held: Any  # memory
    thread: Any
    room: int  # all threads' together

    def start(self) -> list[Any]:
        """Sums, lowest, highest, and how much is held, in steps of all threads."""
        return [f32(0)] * SUMS + [f32(math.inf), f32(-math.inf), i32(0)]

    def at(self, x: Any, seen: list[Any], holds: Any, threads: int) -> list[Any]:
        """`seen`, and `x` as well, which is held if it is one of those to be held and `holds`."""
        *sums, lowest, highest, size = seen
        inside = arith.andi(compared("OGE", x, self.low), compared("OLE", x, self.high))
        lowest = arith.minnumf(lowest, arith.select(inside, x, f32(math.inf)))
        highest = arith.maxnumf(highest, arith.select(inside, x, f32(-math.inf)))
        holds = arith.andi(arith.andi(inside, holds), compared("OGE", x, self.hold_from))
        return [
            *self._summed(x, sums, inside),
            lowest,
            highest,
            self._held(x, size, holds, threads),
        ]

    def at_any(self, x: Any, seen: list[Any], threads: int) -> list[Any]:
        """The same for a look at everything, which needs less."""
        *sums, lowest, highest, size = seen
        inside = compared("OGE", x, f32(LOWEST))
        size = self._held(x, size, compared("OGE", x, self.hold_from), threads)
        return [*self._summed(x, sums, inside), lowest, arith.maxnumf(highest, x), size]

    def _summed(self, x: Any, sums: list[Any], inside: Any) -> list[Any]:
        power = arith.mulf(arith.subf(x, self.reference), self.scale)
        power = arith.minnumf(power, f32(MAX_EXPONENT))
        text = "ex2.approx.ftz.f32 $0, $1;"
        mass = llvm.inline_asm(ir.F32Type.get(), [power], text, "=f,f")
        weight = arith.select(self.by_mass, mass, f32(1))
        weight = arith.select(inside, weight, f32(0))
        return [arith.addf(sums[0], weight)] + [
            llvm.intr_fma(as_number("ge", x, one), weight, total)
            for one, total in zip(self.tries, sums[1:], strict=True)
        ]

    def _held(self, x: Any, size: Any, holds: Any, threads: int) -> Any:
        fits = arith.cmpi(arith.CmpIPredicate.slt, size, i32(self.room))
        with mgpu.when(arith.andi(holds, fits)):
            memref.store(x, self.held, [as_index(arith.addi(size, self.thread))])
        return arith.addi(size, arith.select(holds, i32(threads), i32(0)))


def _look_at_row(
    static: SearchStatic,
    gaze: _Gaze,
    logits: Any,
    row: Any,
    at: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    s, width = static, static.vector
    kind = ir.VectorType.get((width,), ir.F32Type.get())
    vectors, turn = s.vocab // width, s.threads * s.tiles.loads

    def load(item):
        column = as_index(arith.muli(item, i32(width)))
        return vector.load(kind, logits, [row, column])

    def values(register):
        return [
            vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(width)
        ]

    def look(i, seen):
        first = arith.addi(arith.muli(i, i32(turn)), gaze.thread)
        loaded = [load(arith.addi(first, i32(j * s.threads))) for j in range(s.tiles.loads)]
        for register in loaded:
            for x in values(register):
                seen = at(x, seen)
        return seen

    whole_turns = vectors // turn
    seen = loop(i32(whole_turns), look, gaze.start())
    for begin in range(whole_turns * turn, vectors, s.threads):
        item = arith.addi(gaze.thread, i32(begin))
        is_there = arith.cmpi(arith.CmpIPredicate.slt, item, i32(vectors))
        item = arith.minsi(item, i32(vectors - 1))
        for x in values(load(item)):
            x = arith.select(is_there, x, f32(-math.inf))
            seen = at(x, seen)
    return seen


def _look_at_held(static: SearchStatic, gaze: _Gaze, size: Any, narrows: Any) -> list[Any]:
    def look(i, seen):
        place = arith.addi(arith.muli(i, i32(static.threads)), gaze.thread)
        x = memref.load(gaze.held, [as_index(place)])
        # what stays moves to the front: never past a logit that is still to be looked at
        return gaze.at(x, seen, narrows, static.threads)

    *seen, new_size = loop(arith.divui(size, i32(static.threads)), look, gaze.start())
    return [*seen, arith.select(narrows, new_size, size)]


def _reduce(seen: list[Any], parts: Any, parity: Any, warps: int) -> list[Any]:
    """Each of `seen` over the whole program.

    Two sets of `parts` take turns: one barrier is enough.
    """
    lowest = SUMS
    seen = [arith.negf(x) if i == lowest else x for i, x in enumerate(seen)]

    def over_warp(values, distances):
        for distance in distances:
            values = [
                (arith.addf if i < SUMS else arith.maxnumf)(x, utils.shfl_bfly(x, distance))
                for i, x in enumerate(values)
            ]
        return values

    thread = mgpu.thread_idx()
    lane, warp = arith.remui(thread, i32(WARP)), arith.divui(thread, i32(WARP))
    first = arith.muli(parity, i32(REDUCED))

    def place(i, column):
        return [as_index(arith.addi(first, i32(i))), as_index(column)]

    seen = over_warp(seen, (16, 8, 4, 2, 1))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0))):
        for i, value in enumerate(seen):
            memref.store(value, parts, place(i, warp))
    gpu.barrier()
    column = arith.remui(lane, i32(warps))
    seen = [memref.load(parts, place(i, column)) for i in range(REDUCED)]
    distances = [d for d in (16, 8, 4, 2, 1) if d < warps]
    seen = over_warp(seen, distances)
    return [arith.negf(x) if i == lowest else x for i, x in enumerate(seen)]


def look_at(
    static: SearchStatic, look: Look, scale: jax.Array, row: jax.Array, parity: jax.Array, refs: Any
) -> Seen:
    room = static.tiles.held * static.threads

    @inline(
        arg_types=((plgpu.RefType(),) * 4, (SCALAR,) * (11 + TRIES)),
        return_type=[scalar_of(jnp.float32)] * REDUCED,
    )
    def looked(_, refs, numbers):
        logits, held, sizes, parts = refs
        row, parity, at_all, at_held, narrows, by_mass, *rest = (register_of(x) for x in numbers)
        low, high, hold_from, reference, scale, *tries = rest
        thread = mgpu.thread_idx()
        gaze = _Gaze(low, high, hold_from, reference, scale, tries, by_mass, held, thread, room)
        always = arith.constant(ir.IntegerType.get_signless(1), 1)

        def look_at_held():
            size = memref.load(sizes, [as_index(thread)])
            return _look_at_held(static, gaze, size, narrows)

        def look_at_row():
            at = functools.partial(gaze.at, holds=always, threads=static.threads)
            return _look_at_row(static, gaze, logits, as_index(row), at)

        def look_at_all():
            at = functools.partial(gaze.at_any, threads=static.threads)
            return _look_at_row(static, gaze, logits, as_index(row), at)

        *seen, size = _either(
            at_all, look_at_all, lambda: _either(at_held, look_at_held, look_at_row)
        )
        memref.store(size, sizes, [as_index(thread)])
        seen.append(arith.sitofp(ir.F32Type.get(), size))
        return [as_scalar(x) for x in _reduce(seen, parts, parity, static.threads // WARP)]

    numbers = (look.low, look.high, look.hold_from, look.reference, scale, *look.tries)
    flags = (look.at_all, look.at_held, look.narrows, look.by_mass)
    total, *seen = looked(refs, (row, parity, *flags, *numbers))
    *amounts, lowest, highest, most = seen
    return Seen(total, tuple(amounts), lowest, highest, most > room)
