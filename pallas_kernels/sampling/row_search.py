"""The search of one row alone, for a program that looks at the row or at a part that it holds.

What is done between two looks: arithmetic on single numbers, the same in the kernel and elsewhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

TRIES = 8  # thresholds of a look
LOWEST = -3.4028234663852886e38  # the lowest finite float: a banned token lies below it
MAX_EXPONENT = 100.0  # of a mass, so that no sum of masses is infinite
_TOO_HIGH = 64.0  # the best token lies this far over the reference: look again
_TOO_SMALL = 0x7FFFFF  # bits of the largest float that is not normal
_MAX_LOOKS = 200  # far more than any search takes; a row of NaN must end as well

type Number = Float[Array, ""]


class Asked(NamedTuple):
    """What a row asks for; `no top-k` is 0, `no top-p` 1, `no min-p` 0."""

    scale: Number  # from a difference of logits to the binary logarithm of a ratio of masses
    top_k: Number
    top_p: Number
    min_p: Number
    reach: Number  # how far below the best logit min-p keeps, but for rounding


class Look(NamedTuple):
    """What a look is at: logits from `low` to `high`, both included."""

    low: Number
    high: Number
    hold_from: Number  # those from here on are to be held, if the look is at the whole row
    reference: Number  # the logit whose mass is 1
    tries: tuple[Number, ...]
    by_mass: Bool[Array, ""]  # else every token weighs 1
    at_all: Bool[Array, ""]  # at everything: the first look
    at_held: Bool[Array, ""]  # at the part that is held
    narrows: Bool[Array, ""]  # hold what is looked at and no more, if the look is at what is held


class Seen(NamedTuple):
    """What a look finds between `low` and `high`."""

    total: Number  # weight
    amounts: tuple[Number, ...]  # weight from each try on
    lowest: Number  # logit; or, of a look at everything, the lowest float
    highest: Number
    overflows: Bool[Array, ""]  # more is to be held than there is room for


class _State(NamedTuple):
    look: Look
    over: Number  # the weight above `look.high`
    wanted: Number
    best: Number
    held_low: Number  # every logit between these two is held
    held_high: Number
    num_looks: Int32[Array, ""]
    is_fresh: Bool[Array, ""]  # the mass of which top-p is a share is not yet summed
    is_done: Bool[Array, ""]


def find_threshold(
    asked: Asked,
    sampled: tuple[Number, ...],
    reference: Number,
    look: Callable[[Look, Int32[Array, ""]], Seen],
) -> Number:
    """The least logit that the row keeps, or -inf if it filters nothing.

    Args:
        sampled: first tries, from a sample of the row; any finite values do. The part of the row
            from the first on is held.
        reference: a logit near the best.
        look: how to look; it is told how many looks there were before.
    """
    counts = asked.top_k > 0
    first = Look(
        low=jnp.float32(LOWEST),
        high=jnp.float32(jnp.inf),
        hold_from=sampled[0],
        reference=reference,
        tries=sampled,
        by_mass=~counts,
        at_all=jnp.bool_(True),
        at_held=jnp.bool_(False),
        narrows=jnp.bool_(False),
    )
    zero = jnp.float32(0)
    state = _State(
        look=first,
        over=zero,
        wanted=asked.top_k,
        best=zero,
        held_low=zero,
        held_high=zero,
        num_looks=jnp.int32(0),
        is_fresh=~counts,
        is_done=~filters(asked),
    )

    def step(state: _State) -> _State:
        return _conclude(asked, state, look(state.look, state.num_looks))

    state = lax.while_loop(lambda state: ~state.is_done, step, state)
    return jnp.where(filters(asked), state.look.low, -jnp.inf)


def filters(asked: Asked) -> Bool[Array, ""]:
    """Whether the row drops anything."""
    return (asked.top_k > 0) | (asked.top_p < 1) | (asked.min_p > 0)


def _conclude(asked: Asked, state: _State, seen: Seen) -> _State:
    """From one look to the next."""
    look = state.look
    best = jnp.where(look.at_all, seen.highest, state.best)
    floor = jnp.where(asked.min_p > 0, _floor(asked, best), LOWEST)
    repeats = look.at_all & look.by_mass & ((best - look.reference) * asked.scale > _TOO_HIGH)
    # top-p is a share of what min-p leaves: unknown before the best token is known
    restarts = look.at_all & look.by_mass & (asked.min_p > 0) & ~repeats
    low, high, over, wanted = _narrowed(asked, state, seen)
    few = state.over + seen.total < wanted  # fewer tokens than top-k asks for
    settled = ~repeats & ~restarts & ((low >= high) | few)
    turns = settled & ~look.by_mass & (asked.top_p < 1)  # from counting to summing
    ends = (settled & ~turns) | (restarts & (asked.top_p >= 1))

    begins = turns | restarts
    low = jnp.where(repeats, look.low, jnp.where(restarts, floor, low))
    low = jnp.where(settled & ~look.by_mass, jnp.maximum(low, floor), low)
    high = jnp.where(repeats, look.high, jnp.where(begins, best, high))
    held_low, held_high = _held(state, seen)
    held = (low >= held_low) & (high <= held_high) & ~repeats
    by_mass = look.by_mass | turns
    tries = _tries_between(low, high)
    return _State(
        look=Look(
            low=low,
            high=high,
            hold_from=jnp.where(repeats, look.hold_from, low),
            reference=jnp.where(repeats | begins, best, look.reference),
            tries=tuple(
                jnp.where(repeats, old, new) for old, new in zip(look.tries, tries, strict=True)
            ),
            by_mass=by_mass,
            at_all=repeats,
            at_held=held,
            narrows=by_mass | (asked.top_p >= 1),
        ),
        over=jnp.where(repeats | begins, 0.0, over),
        wanted=wanted,
        best=best,
        held_low=held_low,
        held_high=held_high,
        num_looks=state.num_looks + 1,
        is_fresh=(repeats & state.is_fresh) | begins,
        is_done=ends | (state.num_looks >= _MAX_LOOKS),
    )


def _narrowed(asked: Asked, state: _State, seen: Seen) -> tuple[Number, Number, Number, Number]:
    """low, high, over and wanted after a look."""
    look = state.look
    wanted = jnp.where(state.is_fresh, asked.top_p * seen.total, state.wanted)
    low, high, over = look.low, look.high, state.over
    for one, amount in zip(look.tries, seen.amounts, strict=True):
        all_from = state.over + amount
        enough = all_from >= wanted
        low = jnp.where(enough, jnp.maximum(low, one), low)
        high = jnp.where(enough, high, jnp.minimum(high, _value_of(_key_of(one) - 1)))
        over = jnp.where(enough, over, jnp.maximum(over, all_from))
    # ending at logits that exist, ties are settled at once
    return jnp.maximum(low, seen.lowest), jnp.minimum(high, seen.highest), over, wanted


def _held(state: _State, seen: Seen) -> tuple[Number, Number]:
    """Between which two all logits are held after a look; nowhere if the first is the higher."""
    look = state.look
    low = jnp.where(seen.overflows, jnp.inf, look.hold_from)
    low = jnp.where(look.at_held, jnp.where(look.narrows, look.low, state.held_low), low)
    high = jnp.where(look.at_held & ~look.narrows, state.held_high, look.high)
    return low, high


def _floor(asked: Asked, best: Number) -> Number:
    """The lowest float that min-p keeps."""

    def is_kept(value):
        # the best token may be infinite, and inf - inf is NaN
        return (value >= best) | (jnp.exp2((value - best) * asked.scale) >= asked.min_p)

    key = _key_of(jnp.maximum(best + asked.reach, LOWEST))
    for _ in range(2):  # the sum was rounded
        key = jnp.where(is_kept(_value_of(key - 1)), key - 1, key)
    for _ in range(2):
        key = jnp.where(is_kept(_value_of(key)), key, key + 1)
    return jnp.clip(_value_of(key), LOWEST, jnp.maximum(best, LOWEST))


def _tries_between(low: Number, high: Number) -> tuple[Number, ...]:
    """Even ones, and the middle in the order of all floats, which bounds the number of looks."""
    even = [_key_of(low + (high - low) * (i / TRIES)) for i in range(1, TRIES)]
    low_key, high_key = _key_of(low), _key_of(high)
    middle = (low_key >> 1) + (high_key >> 1)  # the sum of two keys may not fit 31 bits
    first = jnp.minimum(low_key + 1, high_key)
    return tuple(_value_of(jnp.minimum(jnp.maximum(k, first), high_key)) for k in [*even, middle])


def _key_of(value: Number) -> Int32[Array, ""]:
    """Whole numbers in the order of the floats; zeros and what is too small to be normal have 0."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    size = jnp.maximum((bits & 0x7FFFFFFF) - _TOO_SMALL, 0)
    return jnp.where(bits < 0, -size, size)


def _value_of(key: Int32[Array, ""]) -> Number:
    bits = jnp.where(key == 0, 0, jnp.abs(key) + _TOO_SMALL)
    sign = jnp.where(key < 0, jnp.int32(-0x80000000), 0)
    return lax.bitcast_convert_type(bits | sign, jnp.float32)
