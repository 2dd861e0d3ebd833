"""min-p, top-k and top-p as a search for one threshold per row.

Each of the three keeps the logits from some value on, so all that is wanted is that value. It is
found by a search in which every pass over the vocabulary tries several thresholds at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import checks

_OP = "filter_logits"
_BLOCK = 32  # neighbouring logits that are kept or set aside together
_NUM_BLOCKS = 256  # of each row are looked through first


class _Tries(NamedTuple):
    """How many thresholds one pass tries between a row's `low` and `high`."""

    even: int  # evenly spaced in value
    in_order: int  # evenly spaced in the order of all floats: this bounds the passes


_CPU_TRIES = _Tries(even=3, in_order=1)
_GPU_TRIES = _Tries(even=14, in_order=1)
_GPU_TRIES_IN_CACHE = _Tries(even=30, in_order=1)


class _Search(NamedTuple):
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


def filter_logits(
    logits: Float[Array, "rows vocab"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """Put -inf in place of every logit that min-p, top-k or top-p drops, in vLLM's order.

    First min-p keeps the tokens at least `min_p` times as probable as the best. Of these, top-k
    keeps the `top_k` best and all that equal the last of them. Of these, top-p keeps, from the
    best down, the fewest whose probabilities reach `top_p` of what is left, and all that equal the
    last of them: so the result does not depend on the order of tokens.

    Args:
        logits: float32, divided by the temperature. -inf is a banned token; it stays out.
        top_k: 0 keeps all.
        top_p: over 0; 1 keeps all.
        min_p: 0 keeps all.

    Returns:
        The logits, -inf where dropped. The best token always stays.

    Raises:
        KernelArgumentError: shapes that do not fit together, or another type; while tracing.

    Exact but for the rounding of float32 sums of probabilities. If no row filters, the last pass
    over the logits is the only one. If some do, three or four more; and 6 to 8 more (11 to 15 on a
    CPU) if a row keeps tokens of more than 256 blocks of 32 neighbours, as top-p does when the
    logits are flat.
    """
    checks.check_shapes(
        _OP,
        {
            "logits": (logits, ("rows", "vocab")),
            "top_k": (top_k, ("rows",)),
            "top_p": (top_p, ("rows",)),
            "min_p": (min_p, ("rows",)),
        },
    )
    for name, array in (("logits", logits), ("top_p", top_p), ("min_p", min_p)):
        checks.check_dtype(_OP, name, array, ("float32",))
    checks.check_dtype(_OP, "top_k", top_k, ("int32",))

    filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
    threshold = lax.cond(
        jnp.any(filters),
        _find_thresholds,
        lambda logits, *_: jnp.full(logits.shape[:1], -jnp.inf, jnp.float32),
        *(logits, top_k, top_p, min_p),
    )
    return jnp.where(logits >= threshold[:, None], logits, -jnp.inf)


def _find_thresholds(
    logits: Float[Array, "rows vocab"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """The least logit that each row keeps."""
    rows, vocab = logits.shape
    padding = ((0, 0), (0, -vocab % _BLOCK))
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    best_of_block, least_of_block = jnp.max(blocks, axis=2), _least(blocks)
    best, least = jnp.max(best_of_block, axis=1), jnp.min(least_of_block, axis=1)
    low = lax.cond(jnp.any(min_p > 0), _apply_min_p, lambda *_: least, logits, best, min_p)
    counts = (top_k > 0) & (top_k < vocab)
    nothing = jnp.zeros_like(best)
    search = _Search(
        low=_key(low),
        high=_key(best),
        low_amount=nothing,
        over_amount=nothing,
        wanted=top_k.astype(jnp.float32),
        rest=nothing,
        by_mass=~counts,
        is_fresh=~counts,
        is_done=(~counts & (top_p >= 1)) | (low >= best),
    )
    if blocks.shape[1] > _NUM_BLOCKS:
        whole = jnp.sum(jnp.where(logits >= low[:, None], _mass(logits, best), 0), axis=1)
        search = _search_best_blocks(search, blocks, best_of_block, whole, top_p)
    if jax.default_backend() != "cpu":
        return _value(_search(search, logits, best, top_p, _GPU_TRIES, keep_mass=False))

    def search_row(row: tuple[_Search, Array, Array, Array]) -> Array:
        search, logits, best, top_p = row
        return _search(search, logits, best, top_p, _CPU_TRIES, keep_mass=True)

    # row by row, so that a pass stays in the cache, and rows that are done cost none
    rows_of_one = jax.tree.map(lambda x: x[:, None], (search, logits, best, top_p))
    return _value(lax.map(search_row, rows_of_one)[:, 0])


def _apply_min_p(
    logits: Float[Array, "rows vocab"], best: Float[Array, " rows"], min_p: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The least finite logit that is probable enough."""
    stays = _mass(logits, best) >= min_p[:, None]
    return _least(jnp.where(stays, logits, -jnp.inf))


def _search_best_blocks(
    search: _Search,
    blocks: Float[Array, "rows blocks places"],
    best_of_block: Float[Array, "rows blocks"],
    whole: Float[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> _Search:
    """Settle the rows for which the blocks with the best first token hold all that is kept."""
    tops, ids = lax.top_k(best_of_block, _NUM_BLOCKS + 1)
    chosen = jnp.take_along_axis(blocks, ids[:, :_NUM_BLOCKS, None], axis=1)
    chosen = chosen.reshape(blocks.shape[0], -1)
    best, left_out, low = tops[:, 0], tops[:, _NUM_BLOCKS], _value(search.low)
    # all logits over the best of the blocks left out are among the chosen, so these stand for all
    stands = (chosen > left_out[:, None]) & (chosen >= low[:, None])
    chosen = jnp.where(stands, chosen, -jnp.inf)
    count = jnp.sum(stands, axis=1, dtype=jnp.float32)
    mass = jnp.sum(jnp.where(stands, _mass(chosen, best), 0), axis=1)
    does = jnp.where(search.by_mass, mass >= top_p * whole, count >= search.wanted)
    does = search.is_done | does | (left_out < low)

    here = search._replace(
        low=jnp.where(search.is_done, search.low, _key(_least(chosen))),
        rest=jnp.where(search.by_mass, jnp.maximum(whole - mass, 0), 0),
        is_done=search.is_done | ~does,
    )
    tries = _CPU_TRIES if jax.default_backend() == "cpu" else _GPU_TRIES_IN_CACHE
    found = _search(here, chosen, best, top_p, tries, keep_mass=True)
    return search._replace(low=jnp.where(does, found, search.low), is_done=does)


def _least(logits: Float[Array, "... places"]) -> Float[Array, "..."]:
    return jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=-1)


def _search(
    search: _Search,
    logits: Float[Array, "rows places"],
    best: Float[Array, " rows"],
    top_p: Float[Array, " rows"],
    tries: _Tries,
    *,
    keep_mass: bool,
) -> Int32[Array, " rows"]:
    """The key of the highest threshold that keeps enough.

    With `keep_mass` the mass of each token is computed once, which costs memory, and not each pass.
    """
    kept_mass = _mass(logits, best) if keep_mass else None

    def narrow(search: _Search) -> _Search:
        mass = _mass(logits, best) if kept_mass is None else kept_mass
        narrower = _narrow(search, logits, mass, top_p, tries)
        one_is_left = ~search.by_mass & (narrower.low_amount - narrower.over_amount <= 1)
        is_settled = (narrower.low >= narrower.high) | one_is_left
        goes_on = is_settled & ~search.by_mass & (top_p < 1)  # from counting to summing
        return narrower._replace(
            low=jnp.where(search.is_done, search.low, narrower.low),
            high=jnp.where(goes_on, _key(best), narrower.high),
            over_amount=jnp.where(goes_on, 0, narrower.over_amount),
            by_mass=search.by_mass | goes_on,
            is_fresh=goes_on,
            is_done=search.is_done | (is_settled & ~goes_on),
        )

    return lax.while_loop(lambda search: ~jnp.all(search.is_done), narrow, search).low


def _narrow(
    search: _Search,
    logits: Float[Array, "rows places"],
    mass: Float[Array, "rows places"],
    top_p: Float[Array, " rows"],
    tries: _Tries,
) -> _Search:
    """Try some thresholds between `low` and `high` in one pass."""
    low, high = _value(search.low), _value(search.high)
    weights = jnp.where(search.by_mass[:, None], mass, 1)
    keys = _choose_tries(search, tries)
    # no logit lies between lowest and low, nor between highest and high: they keep the same
    *amounts, low_amount, lowest, highest = _reduce_together(
        [jnp.where(logits >= _value(key)[:, None], weights, 0) for key in [*keys, search.low]],
        jnp.where(logits >= low[:, None], logits, jnp.inf),
        jnp.where(logits <= high[:, None], logits, -jnp.inf),
    )
    wanted = jnp.where(search.is_fresh, top_p * (low_amount + search.rest), search.wanted)
    low_key = jnp.maximum(search.low, _key(lowest))
    high_key = jnp.minimum(search.high, _key(highest))
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


def _choose_tries(search: _Search, tries: _Tries) -> list[Int32[Array, " rows"]]:
    low, high = _value(search.low), _value(search.high)
    even = [low + (high - low) * (i / (tries.even + 1)) for i in range(1, tries.even + 1)]
    # halves first: the difference of two keys may not fit 31 bits
    step = (search.high // 2 - search.low // 2) // (tries.in_order + 1)
    in_order = [search.low + 2 * step * i for i in range(1, tries.in_order + 1)]
    return [jnp.clip(key, search.low + 1, search.high) for key in [*map(_key, even), *in_order]]


def _mass(
    logits: Float[Array, "rows vocab"], best: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    # the best token may be infinite, and inf - inf is NaN
    is_best = logits == best[:, None]
    return jnp.where(is_best, 1, jnp.exp(logits - best[:, None]))


def _key(value: Float[Array, " rows"]) -> Int32[Array, " rows"]:
    """Whole numbers in the order of the floats."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(key: Int32[Array, " rows"]) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
