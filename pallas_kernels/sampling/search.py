"""The search for the highest threshold of each row that keeps enough tokens, or enough mass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


class Tries(NamedTuple):
    """How many thresholds one pass tries between a row's `low` and `high`."""

    even: int  # evenly spaced in value
    in_order: int  # evenly spaced in the order of all floats: this bounds the passes


class Search(NamedTuple):
    """Between which keys of floats, both included, each row's threshold lies.

    `amount` is a number of tokens while these are counted, and then a mass.
    """

    low: Int32[Array, " rows"]  # keeps enough
    high: Int32[Array, " rows"]  # what lies over it keeps too little
    low_amount: Float[Array, " rows"]  # kept by `low`
    over_amount: Float[Array, " rows"]  # kept by what lies over `high`
    wanted: Float[Array, " rows"]
    rest: Float[Array, " rows"]  # mass that belongs to the row and is not looked through
    by_mass: Bool[Array, " rows"]
    is_fresh: Bool[Array, " rows"]  # the mass of which top_p is a share is not yet summed
    is_done: Bool[Array, " rows"]


def find_highest(
    search: Search,
    logits: Float[Array, "rows places"],
    best: Float[Array, " rows"],
    top_p: Float[Array, " rows"],
    tries: Tries,
    axis: str | None,
    *,
    keep_mass: bool,
) -> Int32[Array, " rows"]:
    """The key of the highest threshold that keeps enough.

    `axis` is the mesh axis over which the logits are split, if they are; all of its devices find
    the same. With `keep_mass` the mass of each token is computed once, which costs memory, and not
    each pass.
    """
    kept_mass = mass_of(logits, best) if keep_mass else None

    def narrow(search: Search) -> Search:
        mass = mass_of(logits, best) if kept_mass is None else kept_mass
        narrower = _narrow(search, logits, mass, top_p, tries, axis)
        one_is_left = ~search.by_mass & (narrower.low_amount - narrower.over_amount <= 1)
        is_settled = (narrower.low >= narrower.high) | one_is_left
        goes_on = is_settled & ~search.by_mass & (top_p < 1)  # from counting to summing
        return narrower._replace(
            low=jnp.where(search.is_done, search.low, narrower.low),
            high=jnp.where(goes_on, key_of(best), narrower.high),
            over_amount=jnp.where(goes_on, 0, narrower.over_amount),
            by_mass=search.by_mass | goes_on,
            is_fresh=goes_on,
            is_done=search.is_done | (is_settled & ~goes_on),
        )

    return lax.while_loop(lambda search: ~jnp.all(search.is_done), narrow, search).low


def _narrow(
    search: Search,
    logits: Float[Array, "rows places"],
    mass: Float[Array, "rows places"],
    top_p: Float[Array, " rows"],
    tries: Tries,
    axis: str | None,
) -> Search:
    """Try some thresholds between `low` and `high` in one pass."""
    low, high = value_of(search.low), value_of(search.high)
    weights = jnp.where(search.by_mass[:, None], mass, 1)
    keys = _choose_tries(search, tries)
    # no logit lies between lowest and low, nor between highest and high: they keep the same
    *amounts, low_amount, lowest, highest = _reduce_together(
        [jnp.where(logits >= value_of(key)[:, None], weights, 0) for key in [*keys, search.low]],
        jnp.where(logits >= low[:, None], logits, jnp.inf),
        jnp.where(logits <= high[:, None], logits, -jnp.inf),
    )
    if axis is not None:
        *amounts, low_amount = lax.psum(jnp.stack([*amounts, low_amount]), axis)
        lowest, highest = lax.pmax(jnp.stack([-lowest, highest]), axis)
        lowest = -lowest
    wanted = jnp.where(search.is_fresh, top_p * (low_amount + search.rest), search.wanted)
    low_key = jnp.maximum(search.low, key_of(lowest))
    high_key = jnp.minimum(search.high, key_of(highest))
    over_amount = search.over_amount
    for key, amount in zip(keys, amounts, strict=True):
        is_enough = amount >= wanted
        raises, lowers = is_enough & (key >= low_key), ~is_enough & (key <= high_key)
        low_key = jnp.where(raises, key, low_key)
        low_amount = jnp.where(raises, amount, low_amount)
        high_key = jnp.where(lowers, key - 1, high_key)
        over_amount = jnp.where(lowers, amount, over_amount)
    return search._replace(
        low=low_key,
        high=high_key,
        low_amount=low_amount,
        over_amount=over_amount,
        wanted=wanted,
    )


def _reduce_together(
    to_sum: list[Float[Array, "rows places"]],
    to_min: Float[Array, "rows places"],
    to_max: Float[Array, "rows places"],
) -> list[Float[Array, " rows"]]:
    """The sums, the minimum and the maximum of each row."""
    if jax.default_backend() == "cpu":  # which vectorises single reductions only
        sums = [jnp.sum(x, axis=1) for x in to_sum]
        return [*sums, jnp.min(to_min, axis=1), jnp.max(to_max, axis=1)]

    def join(left, right):
        sums = [x + y for x, y in zip(left[:-2], right[:-2], strict=True)]
        return (*sums, jnp.minimum(left[-2], right[-2]), jnp.maximum(left[-1], right[-1]))

    # one reduction reads the memory once; of single ones XLA fuses no more than eight
    zero, infinity = jnp.float32(0), jnp.float32(jnp.inf)
    start = (*[zero] * len(to_sum), infinity, -infinity)
    return list(lax.reduce((*to_sum, to_min, to_max), start, join, (1,)))


def _choose_tries(search: Search, tries: Tries) -> list[Int32[Array, " rows"]]:
    low, high = value_of(search.low), value_of(search.high)
    even = [low + (high - low) * (i / (tries.even + 1)) for i in range(1, tries.even + 1)]
    # halves first: the difference of two keys may not fit 31 bits
    step = (search.high // 2 - search.low // 2) // (tries.in_order + 1)
    in_order = [search.low + 2 * step * i for i in range(1, tries.in_order + 1)]
    return [jnp.clip(key, search.low + 1, search.high) for key in [*map(key_of, even), *in_order]]


def mass_of(
    logits: Float[Array, "rows vocab"], best: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    # the best token may be infinite, and inf - inf is NaN
    is_best = logits == best[:, None]
    return jnp.where(is_best, 1, jnp.exp(logits - best[:, None]))


def key_of(value: Float[Array, " rows"]) -> Int32[Array, " rows"]:
    """Whole numbers in the order of the floats."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def value_of(key: Int32[Array, " rows"]) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
