"""How the sampler's kernel looks: at a row, or at what its threads hold of it."""

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
from jax.extend.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import llvm

from pallas_kernels.sampling.kernel_parts import (
    SCALAR,
    WARP,
    Static,
    compare,
    const_index,
    either,
    f32,
    i32,
    index,
    inline,
    of_type,
    register,
    repeat,
    scalar,
    set_where,
)
from pallas_kernels.sampling.row_search import LOWEST, MAX_EXPONENT, TRIES, Look, Seen

SUMS = 1 + TRIES  # of a look: the total and from each try on
REDUCED = SUMS + 3  # and the lowest, the highest, the most that a thread holds
PARTS = (REDUCED + 1, WARP)  # shape of the memory for what each warp saw; the last comes twice


@dataclass(frozen=True)
class Gaze:
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
        inside = arith.andi(compare("OGE", x, self.low), compare("OLE", x, self.high))
        lowest = arith.minnumf(lowest, arith.select(inside, x, f32(math.inf)))
        highest = arith.maxnumf(highest, arith.select(inside, x, f32(-math.inf)))
        holds = arith.andi(arith.andi(inside, holds), compare("OGE", x, self.hold_from))
        weight = arith.select(self.by_mass, self._mass(x), f32(1))
        sums = self._summed(x, sums, arith.select(inside, weight, f32(0)))
        return [*sums, lowest, highest, self._held(x, size, holds, threads)]

    def at_mass(self, x: Any, seen: list[Any], threads: int) -> list[Any]:
        """The same for a look at everything by mass, which needs less."""
        *sums, _, highest, size = seen
        size = self._held(x, size, compare("OGE", x, self.hold_from), threads)
        x = arith.maxnumf(x, f32(LOWEST))  # what is banned or NaN has no mass
        sums = self._summed(x, sums, self._mass(x))
        return [*sums, f32(LOWEST), arith.maxnumf(highest, x), size]

    def at_count(self, x: Any, seen: list[Any], threads: int) -> list[Any]:
        """The same for a look at everything that counts, with one try: what it keeps is held."""
        total, *sums, _, highest, size = seen
        size = self._held(x, size, compare("OGE", x, self.hold_from), threads)
        total = arith.addf(total, set_where("ge", x, f32(LOWEST)))
        return [total, *sums, f32(LOWEST), arith.maxnumf(highest, x), size]

    def counted(self, seen: list[Any], threads: int) -> list[Any]:
        """What `at_count` has left to do at the end."""
        total, *_, lowest, highest, size = seen
        held = arith.sitofp(ir.F32Type.get(), arith.divui(size, i32(threads)))
        return [total, *[held] * TRIES, lowest, highest, size]

    def _mass(self, x: Any) -> Any:
        power = arith.mulf(arith.subf(x, self.reference), self.scale)
        power = arith.minnumf(power, f32(MAX_EXPONENT))
        text = "ex2.approx.ftz.f32 $0, $1;"
        return llvm.inline_asm(ir.F32Type.get(), [power], text, "=f,f")

    def _summed(self, x: Any, sums: list[Any], weight: Any) -> list[Any]:
        return [arith.addf(sums[0], weight)] + [
            llvm.intr_fma(set_where("ge", x, one), weight, total)
            for one, total in zip(self.tries, sums[1:], strict=True)
        ]

    def _held(self, x: Any, size: Any, holds: Any, threads: int) -> Any:
        fits = arith.cmpi(arith.CmpIPredicate.slt, size, i32(self.room))
        with mgpu.when(arith.andi(holds, fits)):
            memref.store(x, self.held, [index(arith.addi(size, self.thread))])
        return arith.addi(size, arith.select(holds, i32(threads), i32(0)))


def _look_at_row(
    static: Static, gaze: Gaze, logits: Any, row: Any, at: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    s, width = static, static.vector
    kind = ir.VectorType.get((width,), ir.F32Type.get())
    vectors, turn = s.vocab // width, s.threads * s.tiles.loads

    def load(item):
        column = index(arith.muli(item, i32(width)))
        return vector.load(kind, logits, [row, column])

    def values(several):
        return [
            vector.extract(several, dynamic_position=[], static_position=[i]) for i in range(width)
        ]

    def look(i, seen):
        first = arith.addi(arith.muli(i, i32(turn)), gaze.thread)
        loaded = [load(arith.addi(first, i32(j * s.threads))) for j in range(s.tiles.loads)]
        for several in loaded:
            for x in values(several):
                seen = at(x, seen)
        return seen

    whole_turns = vectors // turn
    seen = repeat(i32(whole_turns), look, gaze.start())
    for begin in range(whole_turns * turn, vectors, s.threads):
        item = arith.addi(gaze.thread, i32(begin))
        is_there = arith.cmpi(arith.CmpIPredicate.slt, item, i32(vectors))
        item = arith.minsi(item, i32(vectors - 1))
        for x in values(load(item)):
            x = arith.select(is_there, x, f32(-math.inf))
            seen = at(x, seen)
    return seen


def _look_at_held(static: Static, gaze: Gaze, size: Any, narrows: Any) -> list[Any]:
    def look(i, seen):
        place = arith.addi(arith.muli(i, i32(static.threads)), gaze.thread)
        x = memref.load(gaze.held, [index(place)])
        # what stays moves to the front: never past a logit that is still to be looked at
        return gaze.at(x, seen, narrows, static.threads)

    *seen, new_size = repeat(arith.divui(size, i32(static.threads)), look, gaze.start())
    return [*seen, arith.select(narrows, new_size, size)]


def _over_warp(values: list[Any], join: Callable[[Any, Any], Any], lane: Any) -> list[Any]:
    """Each of `values`, of which there are a power of two, joined over the warp: the first of as
    many equal groups of lanes has the first of them, and so on.

    Each step hands half of the values to the other half of the lanes: less than to join each.
    """
    distance = WARP // 2
    while distance:
        if len(values) == 1:
            [value] = values
            values = [join(value, utils.shfl_bfly(value, distance))]
        else:
            is_second = arith.andi(lane, i32(distance))
            is_second = arith.cmpi(arith.CmpIPredicate.ne, is_second, i32(0))
            half, joined = len(values) // 2, []
            for first, second in zip(values[:half], values[half:], strict=True):
                mine = arith.select(is_second, second, first)
                other = arith.select(is_second, first, second)
                joined.append(join(mine, utils.shfl_bfly(other, distance)))
            values = joined
        distance //= 2
    return values


def _reduce_warp(seen: list[Any], parts: Any) -> None:
    """Each of `seen` over the warp, into `parts`; the lowest as the highest of the negated ones."""
    thread = mgpu.thread_idx()
    lane, warp = arith.remui(thread, i32(WARP)), arith.divui(thread, i32(WARP))
    sums, (lowest, highest, size) = seen[:SUMS], seen[SUMS:]
    most = [arith.negf(lowest), highest, size, size]
    for values, join, first in ((sums, arith.addf, 0), (most, arith.maxnumf, SUMS)):
        lanes = WARP // len(values)
        [value] = _over_warp(values, join, lane)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, i32(lanes)), i32(0))):
            which = arith.addi(arith.divui(lane, i32(lanes)), i32(first))
            memref.store(value, parts, [index(which), index(warp)])


def _reduce_parts(parts: Any, warps: int) -> list[Any]:
    """What the warps reduced, over all of them; to be run by one whole warp."""
    column = index(arith.remui(mgpu.thread_idx(), i32(warps)))
    values = [memref.load(parts, [const_index(i), column]) for i in range(REDUCED)]
    distance = warps // 2
    while distance:
        values = [
            (arith.addf if i < SUMS else arith.maxnumf)(x, utils.shfl_bfly(x, distance))
            for i, x in enumerate(values)
        ]
        distance //= 2
    return [arith.negf(x) if i == SUMS else x for i, x in enumerate(values)]


def look_around(static: Static, look: Look, scale: jax.Array, row: jax.Array, refs: Any) -> None:
    """Look, and leave in `parts` what each warp saw."""
    room = static.room

    @inline(arg_types=((plgpu.RefType(),) * 4, (SCALAR,) * (10 + TRIES)))
    def looked(_, refs, numbers):
        logits, held, sizes, parts = refs
        row, at_all, at_held, narrows, by_mass, *rest = (register(x) for x in numbers)
        low, high, hold_from, reference, scale, *tries = rest
        thread = mgpu.thread_idx()
        gaze = Gaze(low, high, hold_from, reference, scale, tries, by_mass, held, thread, room)
        always = arith.constant(ir.IntegerType.get_signless(1), 1)

        def look_at_held():
            size = memref.load(sizes, [index(thread)])
            return _look_at_held(static, gaze, size, narrows)

        def look_at_row():
            at = functools.partial(gaze.at, holds=always, threads=static.threads)
            return _look_at_row(static, gaze, logits, index(row), at)

        def look_at_all():
            def by_mass():
                at = functools.partial(gaze.at_mass, threads=static.threads)
                return _look_at_row(static, gaze, logits, index(row), at)

            def count():
                at = functools.partial(gaze.at_count, threads=static.threads)
                seen = _look_at_row(static, gaze, logits, index(row), at)
                return gaze.counted(seen, static.threads)

            return either(gaze.by_mass, by_mass, count, types)

        def look_at_some():
            return either(at_held, look_at_held, look_at_row, types)

        types = [x.type for x in gaze.start()]
        *seen, size = either(at_all, look_at_all, look_at_some, types)
        memref.store(size, sizes, [index(thread)])
        _reduce_warp([*seen, arith.sitofp(ir.F32Type.get(), size)], parts)

    flags = (look.at_all, look.at_held, look.narrows, look.by_mass)
    numbers = (look.low, look.high, look.hold_from, look.reference, scale, *look.tries)
    looked(refs, (row, *flags, *numbers))


def seen_by_all(static: Static, parts: Any) -> Seen:
    """What the whole program saw; to be run by one whole warp."""

    @inline(arg_types=(plgpu.RefType(),), return_type=[of_type(jnp.float32)] * REDUCED)
    def reduced(_, parts):
        return [scalar(x) for x in _reduce_parts(parts, static.warps)]

    total, *seen = reduced(parts)
    *amounts, lowest, highest, most = seen
    return Seen(total, tuple(amounts), lowest, highest, most > static.room)
