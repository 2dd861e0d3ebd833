"""Thresholds of top-k, top-p and min-p as one Mosaic GPU kernel: a program searches a row.

It looks once at the whole row, guided by a sample of it, and holds what may matter in shared
memory, each thread the logits that it saw itself; most rows are settled by looking at these alone.
What lies between two looks is `row_search`; here is how to look.
"""

import functools
import math
from collections.abc import Callable
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
from jax.extend.mlir.dialects import arith, memref, scf, vector
from jaxlib.mlir.dialects import gpu, llvm
from jaxtyping import Array, Float, Int32

from pallas_kernels.sampling import row_search
from pallas_kernels.sampling.row_search import LOWEST, MAX_EXPONENT, TRIES, Asked, Look, Seen
from pallas_kernels.tuning import SearchTiles

WARPGROUP, WARP = 128, 32  # threads
SAMPLE = 256  # logits of a row that are ranked first
MIN_VOCAB = 8192  # of smaller ones a sample says little, and XLA is fast enough
SUMS = 1 + TRIES  # of a look: the total and from each try on
REDUCED = SUMS + 3  # and the lowest, the highest, the most that a thread holds
NUMBERS = 64  # at least those of a state
SCALAR = plgpu.Layout.WG_SPLAT(())
FIRST_RANKS = (4, SAMPLE // 16, SAMPLE // 6)  # of the first try: least, without top-k, most
OTHER_RANKS = tuple(SAMPLE * (2 * i + 1) // (2 * TRIES) for i in range(1, TRIES))
_inline: Any = plgpu.inline_mgpu  # what it returns takes no context, which type checkers miss


def supports(vocab: int) -> bool:
    """Whether the kernel takes rows of this width."""
    return MIN_VOCAB <= vocab < 2**24  # counts are floats


@dataclass(frozen=True)
class _Static:
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


def _f32(value: float) -> Any:
    return mgpu.c(value, ir.F32Type.get())


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _scalar(value: Any) -> mgpu.FragmentedArray:
    is_signed = True if isinstance(value.type, ir.IntegerType) else None
    return mgpu.FragmentedArray.splat(value, (), is_signed=is_signed)


def _register(value: mgpu.FragmentedArray) -> Any:
    return value.registers.item()


def _of_type(dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((), dtype, layout=SCALAR)


def _set(relation: str, x: Any, y: Any) -> Any:
    """1 where the relation holds, else 0, as a float: one instruction, and NaN gives 0."""
    text = f"set.{relation}.f32.f32 $0, $1, $2;"
    return llvm.inline_asm(ir.F32Type.get(), [x, y], text, "=f,f,f")


def _is(relation: str, x: Any, y: Any) -> Any:
    return arith.cmpf(getattr(arith.CmpFPredicate, relation), x, y)


def _count(bound: Any, step: Any, carry: list[Any]) -> list[Any]:
    """Run `step(i, *carry)` for i from 0 to below `bound`."""

    @mgpu.fori(bound, carry)
    def loop(i, carry):
        return step(i, carry)

    return loop.results


def _either(condition: Any, yes: Callable[[], list[Any]], no: Callable[[], list[Any]]) -> list[Any]:
    types = [*[ir.F32Type.get()] * (REDUCED - 1), ir.IntegerType.get_signless(32)]
    branch = scf.IfOp(condition, types, has_else=True)
    for block, make in ((branch.then_block, yes), (branch.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)


# --- looking -------------------------------------------------------------------------------------


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
        return [_f32(0)] * SUMS + [_f32(math.inf), _f32(-math.inf), _i32(0)]

    def at(self, x: Any, seen: list[Any], holds: Any, threads: int) -> list[Any]:
        """`seen`, and `x` as well, which is held if it is one of those to be held and `holds`."""
        *sums, lowest, highest, size = seen
        inside = arith.andi(_is("OGE", x, self.low), _is("OLE", x, self.high))
        lowest = arith.minnumf(lowest, arith.select(inside, x, _f32(math.inf)))
        highest = arith.maxnumf(highest, arith.select(inside, x, _f32(-math.inf)))
        holds = arith.andi(arith.andi(inside, holds), _is("OGE", x, self.hold_from))
        weight = arith.select(self.by_mass, self._mass(x), _f32(1))
        sums = self._summed(x, sums, arith.select(inside, weight, _f32(0)))
        return [*sums, lowest, highest, self._held(x, size, holds, threads)]

    def at_mass(self, x: Any, seen: list[Any], threads: int) -> list[Any]:
        """The same for a look at everything by mass, which needs less."""
        *sums, lowest, highest, size = seen
        size = self._held(x, size, _is("OGE", x, self.hold_from), threads)
        x = arith.maxnumf(x, _f32(LOWEST))  # what is banned or NaN has no mass
        sums = self._summed(x, sums, self._mass(x))
        return [*sums, lowest, arith.maxnumf(highest, x), size]

    def at_count(self, x: Any, seen: list[Any], threads: int) -> list[Any]:
        """The same for a look at everything that counts, with one try: what it keeps is held."""
        total, *sums, lowest, highest, size = seen
        size = self._held(x, size, _is("OGE", x, self.hold_from), threads)
        total = arith.addf(total, _set("ge", x, _f32(LOWEST)))
        return [total, *sums, lowest, arith.maxnumf(highest, x), size]

    def counted(self, seen: list[Any], threads: int) -> list[Any]:
        """What `at_count` has left to do at the end."""
        total, *_, lowest, highest, size = seen
        held = arith.sitofp(ir.F32Type.get(), arith.divui(size, _i32(threads)))
        return [total, *[held] * TRIES, lowest, highest, size]

    def _mass(self, x: Any) -> Any:
        power = arith.mulf(arith.subf(x, self.reference), self.scale)
        power = arith.minnumf(power, _f32(MAX_EXPONENT))
        text = "ex2.approx.ftz.f32 $0, $1;"
        return llvm.inline_asm(ir.F32Type.get(), [power], text, "=f,f")

    def _summed(self, x: Any, sums: list[Any], weight: Any) -> list[Any]:
        return [arith.addf(sums[0], weight)] + [
            llvm.intr_fma(_set("ge", x, one), weight, total)
            for one, total in zip(self.tries, sums[1:], strict=True)
        ]

    def _held(self, x: Any, size: Any, holds: Any, threads: int) -> Any:
        fits = arith.cmpi(arith.CmpIPredicate.slt, size, _i32(self.room))
        with mgpu.when(arith.andi(holds, fits)):
            memref.store(x, self.held, [_index(arith.addi(size, self.thread))])
        return arith.addi(size, arith.select(holds, _i32(threads), _i32(0)))


def _look_at_row(
    static: _Static, gaze: _Gaze, logits: Any, row: Any, at: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    s, width = static, static.vector
    kind = ir.VectorType.get((width,), ir.F32Type.get())
    vectors, turn = s.vocab // width, s.threads * s.tiles.loads

    def load(item):
        column = _index(arith.muli(item, _i32(width)))
        return vector.load(kind, logits, [row, column])

    def values(register):
        return [
            vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(width)
        ]

    def look(i, seen):
        first = arith.addi(arith.muli(i, _i32(turn)), gaze.thread)
        loaded = [load(arith.addi(first, _i32(j * s.threads))) for j in range(s.tiles.loads)]
        for register in loaded:
            for x in values(register):
                seen = at(x, seen)
        return seen

    whole_turns = vectors // turn
    seen = _count(_i32(whole_turns), look, gaze.start())
    for begin in range(whole_turns * turn, vectors, s.threads):
        item = arith.addi(gaze.thread, _i32(begin))
        is_there = arith.cmpi(arith.CmpIPredicate.slt, item, _i32(vectors))
        item = arith.minsi(item, _i32(vectors - 1))
        for x in values(load(item)):
            x = arith.select(is_there, x, _f32(-math.inf))
            seen = at(x, seen)
    return seen


def _look_at_held(static: _Static, gaze: _Gaze, size: Any, narrows: Any) -> list[Any]:
    def look(i, seen):
        place = arith.addi(arith.muli(i, _i32(static.threads)), gaze.thread)
        x = memref.load(gaze.held, [_index(place)])
        # what stays moves to the front: never past a logit that is still to be looked at
        return gaze.at(x, seen, narrows, static.threads)

    *seen, new_size = _count(arith.divui(size, _i32(static.threads)), look, gaze.start())
    return [*seen, arith.select(narrows, new_size, size)]


def _over_warp(values: list[Any], join: Callable[[Any, Any], Any], lane: Any) -> list[Any]:
    """One value a lane: joined over the warp, the first of each eighth (or fourth) of the lanes has
    one of the eight (or four) `values`.

    Each step hands half of the values to the other half of the lanes: fewer than to add up each.
    """
    distance = WARP // 2
    while distance:
        if len(values) == 1:
            [value] = values
            values = [join(value, utils.shfl_bfly(value, distance))]
        else:
            is_second = arith.andi(lane, _i32(distance))
            is_second = arith.cmpi(arith.CmpIPredicate.ne, is_second, _i32(0))
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
    lane, warp = arith.remui(thread, _i32(WARP)), arith.divui(thread, _i32(WARP))
    sums, (lowest, highest, size) = seen[:SUMS], seen[SUMS:]
    most = [arith.negf(lowest), highest, size, size]
    for values, join, first in ((sums, arith.addf, 0), (most, arith.maxnumf, SUMS)):
        lanes = WARP // len(values)
        [value] = _over_warp(values, join, lane)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, _i32(lanes)), _i32(0))):
            place = arith.addi(arith.divui(lane, _i32(lanes)), _i32(first))
            memref.store(value, parts, [_index(place), _index(warp)])


def _reduce_parts(parts: Any, warps: int) -> list[Any]:
    """What the warps reduced, over all of them; to be run by one whole warp."""
    column = _index(arith.remui(mgpu.thread_idx(), _i32(warps)))
    index = ir.IndexType.get()
    values = [memref.load(parts, [mgpu.c(i, index), column]) for i in range(REDUCED)]
    distance = warps // 2
    while distance:
        values = [
            (arith.addf if i < SUMS else arith.maxnumf)(x, utils.shfl_bfly(x, distance))
            for i, x in enumerate(values)
        ]
        distance //= 2
    return [arith.negf(x) if i == SUMS else x for i, x in enumerate(values)]


def _look(static: _Static, look: Look, scale: jax.Array, row: jax.Array, refs: Any) -> None:
    """Look, and leave in `parts` what each warp saw."""
    room = static.tiles.held * static.threads

    @_inline(arg_types=((plgpu.RefType(),) * 4, (SCALAR,) * (10 + TRIES)))
    def looked(_, refs, numbers):
        logits, held, sizes, parts = refs
        row, at_all, at_held, narrows, by_mass, *rest = (_register(x) for x in numbers)
        low, high, hold_from, reference, scale, *tries = rest
        thread = mgpu.thread_idx()
        gaze = _Gaze(low, high, hold_from, reference, scale, tries, by_mass, held, thread, room)
        always = arith.constant(ir.IntegerType.get_signless(1), 1)

        def look_at_held():
            size = memref.load(sizes, [_index(thread)])
            return _look_at_held(static, gaze, size, narrows)

        def look_at_row():
            at = functools.partial(gaze.at, holds=always, threads=static.threads)
            return _look_at_row(static, gaze, logits, _index(row), at)

        def look_at_all():
            def by_mass():
                at = functools.partial(gaze.at_mass, threads=static.threads)
                return _look_at_row(static, gaze, logits, _index(row), at)

            def count():
                at = functools.partial(gaze.at_count, threads=static.threads)
                seen = _look_at_row(static, gaze, logits, _index(row), at)
                return gaze.counted(seen, static.threads)

            return _either(gaze.by_mass, by_mass, count)

        *seen, size = _either(
            at_all, look_at_all, lambda: _either(at_held, look_at_held, look_at_row)
        )
        memref.store(size, sizes, [_index(thread)])
        _reduce_warp([*seen, arith.sitofp(ir.F32Type.get(), size)], parts)

    flags = (look.at_all, look.at_held, look.narrows, look.by_mass)
    numbers = (look.low, look.high, look.hold_from, look.reference, scale, *look.tries)
    looked(refs, (row, *flags, *numbers))


def _seen(static: _Static, parts: Any) -> Seen:
    """What the whole program saw; to be run by one whole warp."""

    @_inline(arg_types=(plgpu.RefType(),), return_type=[_of_type(jnp.float32)] * REDUCED)
    def reduced(_, parts):
        return [_scalar(x) for x in _reduce_parts(parts, static.threads // WARP)]

    total, *seen = reduced(parts)
    *amounts, lowest, highest, most = seen
    return Seen(total, tuple(amounts), lowest, highest, most > static.tiles.held * static.threads)


# --- numbers that all threads share --------------------------------------------------------------


def _load(ref: Any, like: Any) -> Any:
    """A tree of numbers from shared memory."""
    leaves, tree = jax.tree.flatten(like)

    @_inline(arg_types=(plgpu.RefType(),), return_type=[_of_type(jnp.float32)] * len(leaves))
    def load(_, ref):
        index = ir.IndexType.get()
        return [_scalar(memref.load(ref, [mgpu.c(i, index)])) for i in range(len(leaves))]

    loaded = zip(load(ref), leaves, strict=True)
    return tree.unflatten([x > 0 if leaf.dtype == jnp.bool_ else x for x, leaf in loaded])


def _store(ref: Any, numbers: Any) -> None:
    """A tree of numbers into shared memory, by the first thread."""
    leaves = [
        jnp.where(leaf, 1.0, 0.0) if leaf.dtype == jnp.bool_ else leaf
        for leaf in jax.tree.leaves(numbers)
    ]

    @_inline(arg_types=(plgpu.RefType(), (SCALAR,) * len(leaves)))
    def store(_, ref, leaves):
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, mgpu.thread_idx(), _i32(0))):
            for i, leaf in enumerate(leaves):
                memref.store(_register(leaf), ref, [mgpu.c(i, ir.IndexType.get())])

    store(ref, tuple(leaves))


def _is_first_warp() -> jax.Array:
    @_inline(return_type=_of_type(jnp.bool_))
    def is_first(_):
        return _scalar(arith.cmpi(arith.CmpIPredicate.ult, mgpu.thread_idx(), _i32(WARP)))

    return is_first()


def _wait_for_all() -> None:
    @_inline()
    def wait(_):
        gpu.barrier()

    wait()


# --- the sample ----------------------------------------------------------------------------------


def _rank_sample(static: _Static, values: Any, ranks: Any) -> None:
    """Into `ranks`, for each part of the sample: how many are larger, and how many not smaller."""
    thread, length = mgpu.thread_idx(), SAMPLE // static.parts
    mine = memref.load(values, [_index(arith.remui(thread, _i32(SAMPLE)))])
    begin = arith.muli(arith.divui(thread, _i32(SAMPLE)), _i32(length))
    kind = ir.VectorType.get((4,), ir.F32Type.get())

    def compare(i, counts):
        larger, not_smaller = counts
        place = arith.addi(begin, arith.muli(i, _i32(4)))
        others = vector.load(kind, values, [_index(place)])
        for j in range(4):
            other = vector.extract(others, dynamic_position=[], static_position=[j])
            larger = arith.addf(larger, _set("gt", other, mine))
            not_smaller = arith.addf(not_smaller, _set("ge", other, mine))
        return [larger, not_smaller]

    counts = _count(_i32(length // 4), compare, [_f32(0), _f32(0)])
    for i, number in enumerate(counts):
        memref.store(number, ranks, [mgpu.c(i, ir.IndexType.get()), _index(thread)])


def _choose(static: _Static, values: Any, ranks: Any, chosen: Any, wanted: list[Any]) -> None:
    """Into `chosen`, the logits of the wanted ranks."""
    thread, index = mgpu.thread_idx(), ir.IndexType.get()
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, _i32(SAMPLE))):
        mine = memref.load(values, [_index(thread)])
        sums = []
        for i in range(2):
            parts = [
                memref.load(ranks, [mgpu.c(i, index), _index(arith.addi(thread, _i32(p * SAMPLE)))])
                for p in range(static.parts)
            ]
            sums.append(functools.reduce(arith.addf, parts))
        for i, rank in enumerate(wanted):
            is_it = arith.andi(_is("OLE", sums[0], rank), _is("OGT", sums[1], rank))
            with mgpu.when(is_it):  # equals write the same
                memref.store(mine, chosen, [mgpu.c(i, index)])


def _sample(
    static: _Static, row: jax.Array, needed: jax.Array, first_rank: jax.Array, refs: Any
) -> tuple[list[jax.Array], jax.Array]:
    """The first tries and the best of a sample of the row."""
    stride = static.vocab // SAMPLE

    @_inline(
        arg_types=((plgpu.RefType(),) * 4, SCALAR, SCALAR, SCALAR),
        return_type=[_of_type(jnp.float32)] * (TRIES + 1),
    )
    def sampled(_, refs, row, needed, first_rank):
        logits, values, ranks, chosen = refs
        thread, first_rank = mgpu.thread_idx(), _register(first_rank)
        wanted = [first_rank, *(_f32(float(rank)) for rank in OTHER_RANKS), _f32(0)]
        with mgpu.when(_register(needed)):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, _i32(SAMPLE))):
                column = _index(arith.muli(thread, _i32(stride)))
                x = memref.load(logits, [_index(_register(row)), column])
                x = arith.select(_is("OGT", x, _f32(LOWEST)), x, _f32(LOWEST))
                memref.store(x, values, [_index(thread)])
            gpu.barrier()
            _rank_sample(static, values, ranks)
            gpu.barrier()
            _choose(static, values, ranks, chosen, wanted)
            gpu.barrier()
        index = ir.IndexType.get()
        return [_scalar(memref.load(chosen, [mgpu.c(i, index)])) for i in range(TRIES + 1)]

    *tries, best = sampled(refs, row, needed, first_rank)
    return tries, best


# --- the kernel ----------------------------------------------------------------------------------


def _load_asked(asked: Any, row: jax.Array) -> tuple[Asked, jax.Array]:
    @_inline(arg_types=(plgpu.RefType(), SCALAR), return_type=[_of_type(jnp.float32)] * 6)
    def load(_, asked, row):
        row, index = _index(_register(row)), ir.IndexType.get()
        return [_scalar(memref.load(asked, [row, mgpu.c(i, index)])) for i in range(6)]

    *numbers, first_rank = load(asked, row)
    return Asked(*numbers), first_rank


def _find_threshold(static: _Static, refs: tuple[Any, ...]) -> None:
    logits, asked_ref, out, held, sizes, parts, values, ranks, chosen, numbers = refs
    row = lax.axis_index("row")
    asked, first_rank = _load_asked(asked_ref, row)
    needed = row_search.filters(asked)
    tries, best = _sample(static, row, needed, first_rank, (logits, values, ranks, chosen))
    begun = (asked, row_search.begin(asked, tuple(tries), best))
    _store(numbers, begun)

    def look(_: Any) -> jax.Array:
        asked, state = _load(numbers, begun)
        _look(static, state.look, asked.scale, row, (logits, held, sizes, parts))
        _wait_for_all()

        @pl.when(_is_first_warp())
        def _():
            # by one warp: what all compute takes 32 times as long
            _store(numbers, (asked, row_search.conclude(asked, state, _seen(static, parts))))

        _wait_for_all()
        return _load(numbers, begun)[1].is_done

    _wait_for_all()
    lax.while_loop(lambda is_done: ~is_done, look, ~needed)
    asked, state = _load(numbers, begun)
    _store(out.at[pl.ds(row, 1)], row_search.threshold(asked, state.look.low))


def find_thresholds_kernel(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    tiles: SearchTiles,
) -> Float[Array, " rows"]:
    """The least logit that each row keeps, -inf where it keeps all."""
    rows, vocab = logits.shape
    static = _Static(vocab, tiles)
    top_k = jnp.where(top_k < vocab, top_k, 0).astype(jnp.float32)
    # of the first try on there should be twice as many tokens as top-k wants, and a few
    least, usual, most = FIRST_RANKS
    of_top_k = jnp.minimum(jnp.ceil(top_k * (2 * SAMPLE / vocab)) + least, most)
    first_rank = jnp.where(top_k > 0, of_top_k, usual)
    scale = math.log2(math.e) / temperature
    asked = (scale, top_k, top_p, min_p, temperature * jnp.log(min_p), first_rank)

    def body(*refs):
        _find_threshold(static, refs)

    threads = static.threads
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        scratch_types=[
            plgpu.SMEM((tiles.held * threads,), jnp.float32),
            plgpu.SMEM((threads,), jnp.int32),
            plgpu.SMEM((REDUCED + 1, WARP), jnp.float32),
            plgpu.SMEM((SAMPLE,), jnp.float32),
            plgpu.SMEM((2, threads), jnp.float32),
            plgpu.SMEM((TRIES + 1,), jnp.float32),
            plgpu.SMEM((NUMBERS,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("row",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )(logits, jnp.stack(asked, axis=1))
