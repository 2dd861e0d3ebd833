"""Reductions over a vocabulary of which each device of a mesh axis may hold a part, in order.

`axis` is that axis, to be named inside `jax.shard_map`, or None where one device holds it all.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def sum_over(x: Array, axis: str | None) -> Array:
    return x if axis is None else lax.psum(x, axis)


def max_over(x: Array, axis: str | None) -> Array:
    return x if axis is None else lax.pmax(x, axis)


def min_over(x: Array, axis: str | None) -> Array:
    return x if axis is None else lax.pmin(x, axis)


def num_parts(axis: str | None) -> int:
    return 1 if axis is None else lax.axis_size(axis)


def log_sum_exp(
    logits: Float[Array, "rows vocab"], axis: str | None = None
) -> Float[Array, " rows"]:
    """The logarithm of each row's sum of exponentials."""
    if axis is None:
        return jax.nn.logsumexp(logits, axis=-1)
    peak = lax.pmax(jnp.max(logits, axis=-1), axis)
    peak = jnp.where(jnp.isfinite(peak), peak, 0)  # what is infinite or NaN shows in the sum
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), axis)) + peak


def logits_of(
    logits: Float[Array, "rows vocab"], token_ids: Int32[Array, "rows n"], axis: str | None = None
) -> Float[Array, "rows n"]:
    """The logits of some tokens a row."""
    if axis is None:
        return jnp.take_along_axis(logits, token_ids, axis=-1, mode="clip")
    places = token_ids - lax.axis_index(axis) * logits.shape[1]
    found = jnp.take_along_axis(logits, places, axis=-1, mode="clip")
    is_here = (places >= 0) & (places < logits.shape[1])
    return lax.psum(jnp.where(is_here, found, 0), axis)


def logit_of(
    logits: Float[Array, "rows vocab"], token_ids: Int32[Array, " rows"], axis: str | None = None
) -> Float[Array, " rows"]:
    """The logit of one token a row."""
    return logits_of(logits, token_ids[:, None], axis)[:, 0]


def best_token(
    logits: Float[Array, "rows vocab"], axis: str | None = None
) -> Int32[Array, " rows"]:
    """The token with the largest logit of each row; of equal ones the lowest id."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if axis is None:
        return tokens
    peaks = lax.all_gather(logit_of(logits, tokens), axis)
    owners = jnp.argmax(peaks, axis=0)
    index = lax.axis_index(axis)
    return lax.psum(jnp.where(owners == index, tokens + index * logits.shape[1], 0), axis)
