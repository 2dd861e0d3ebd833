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
# thresholds tried in one pass: evenly spaced in value, and in the order of all floats, which
# bounds the number of passes whatever the logits
_CPU_TRIES, _GPU_TRIES = (3, 1), (10, 5)


class _Search(NamedTuple):
    """Where a row's threshold is known to lie, as keys of floats: `low` keeps enough, `high` does not."""

    low: Int32[Array, " rows"]
    high: Int32[Array, " rows"]
    wanted: Float[Array, " rows"]  # tokens to keep, or their mass
    by_mass: Bool[Array, " rows"]  # counts tokens first if False, then their mass
    is_fresh: Bool[Array, " rows"]  # `wanted` is still the share of a mass not yet summed
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

    Exact but for the rounding of float32 sums of probabilities. If no row filters, this costs
    nothing; else two passes over the logits to begin with and some 5 to 8 more.
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
    best = jnp.max(logits, axis=1)
    survives = (_mass(logits, best) >= min_p[:, None]) & (logits > -jnp.inf)
    lowest = jnp.min(jnp.where(survives, logits, jnp.inf), axis=1)
    num_left = jnp.sum(survives, axis=1, dtype=jnp.int32)
    counts = (top_k > 0) & (top_k < num_left)
    begin = _Search(
        low=_key(lowest),
        high=_key(best) + 1,
        wanted=top_k.astype(jnp.float32),
        by_mass=~counts,
        is_fresh=~counts,
        is_done=(num_left == 0) | (~counts & (top_p >= 1)),
    )
    search = lax.while_loop(
        lambda search: ~jnp.all(search.is_done),
        lambda search: _narrow(search, logits, best, top_p),
        begin,
    )
    return jnp.where(num_left == 0, -jnp.inf, _value(search.low))


def _narrow(
    search: _Search,
    logits: Float[Array, "rows vocab"],
    best: Float[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> _Search:
    """Try some thresholds between `low` and `high` in one pass over the logits."""
    low, high = _value(search.low), _value(search.high)
    weights = jnp.where(search.by_mass[:, None], _mass(logits, best), 1)

    def kept(threshold):
        return jnp.sum(jnp.where(logits >= threshold[:, None], weights, 0), axis=1)

    tries = _tries(search)
    kept_by_try = [kept(_value(key)) for key in tries]
    kept_by_low = kept(low)
    lowest = jnp.min(jnp.where(logits >= low[:, None], logits, jnp.inf), axis=1)
    highest = jnp.max(jnp.where(logits < high[:, None], logits, -jnp.inf), axis=1)

    wanted = jnp.where(search.is_fresh, top_p * kept_by_low, search.wanted)
    # no logit lies between these and the old ends, so the sets that they keep are the same
    new_low, new_high = (
        jnp.maximum(search.low, _key(lowest)),
        jnp.minimum(search.high, _key(highest) + 1),
    )
    for key, amount in zip(tries, kept_by_try, strict=True):
        is_enough = amount >= wanted
        new_low = jnp.where(is_enough, jnp.maximum(new_low, key), new_low)
        new_high = jnp.where(is_enough, new_high, jnp.minimum(new_high, key))

    is_settled = new_low >= new_high - 1
    goes_on = is_settled & ~search.by_mass & (top_p < 1)  # from counting to summing
    was_done = search.is_done
    return _Search(
        low=jnp.where(was_done, search.low, new_low),
        high=jnp.where(goes_on, _key(best) + 1, new_high),
        wanted=wanted,
        by_mass=search.by_mass | goes_on,
        is_fresh=goes_on,
        is_done=was_done | (is_settled & ~goes_on),
    )


def _tries(search: _Search) -> list[Int32[Array, " rows"]]:
    in_value, in_order = _CPU_TRIES if jax.default_backend() == "cpu" else _GPU_TRIES
    low, high = _value(search.low), _value(search.high)
    tries = [_key(low + (high - low) * (i / (in_value + 1))) for i in range(1, in_value + 1)]
    # halves first: the difference of two keys may not fit 31 bits
    step = (search.high // 2 - search.low // 2) // (in_order + 1)
    tries += [search.low + 2 * step * i for i in range(1, in_order + 1)]
    return [jnp.clip(key, search.low + 1, search.high - 1) for key in tries]


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
