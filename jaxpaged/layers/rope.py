"""Rotary position embedding: angles from positions, once a step, and the rotation."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from numpy.typing import NDArray

from jaxpaged.config.architecture import RopeConfig
from pallas_kernels import rope_write

type Angles = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]
"""Cosine and sine of every token's angles, float32."""


def rope_angles(positions: Int32[Array, " tokens"], head_dim: int, rope: RopeConfig) -> Angles:
    """Compute cosines and sines for `positions`, in float32.

    Source: Su et al. 2021 (arXiv 2104.09864); scaling by Chen et al. 2023 (arXiv 2306.15595,
    linear), Peng et al. 2023 (arXiv 2309.00071, yarn), the Llama 3 report (arXiv 2407.21783).
    """
    places = positions.astype(jnp.float32)[:, None]
    if rope.kind == "dynamic":
        angles = places * _dynamic_frequencies(places, head_dim, rope)
    else:
        angles = places * jnp.asarray(frequencies(head_dim, rope))[None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "tokens heads head_dim"], angles: Angles
) -> Float[Array, "tokens heads head_dim"]:
    """Turn each pair (i, i + head_dim / 2) of `x` by its angle, in float32, stored in x's type."""
    return rope_write.rotate(x, *angles)


def frequencies(head_dim: int, rope: RopeConfig) -> NDArray[np.float32]:
    """Angle per position of each pair, `[head_dim / 2]`, for the kinds that fix it once."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        plain = _llama3_frequencies(plain, rope)
    elif rope.kind == "yarn":
        plain = _yarn_frequencies(plain, head_dim, rope)
    return plain.astype(np.float32)


def _llama3_frequencies(plain: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    # turns within the original context: few -> divide by factor, many -> keep, between -> blend
    turns = rope.original_max_len * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (keep + (1 - keep) / rope.factor)


def _yarn_frequencies(
    plain: NDArray[np.float64], head_dim: int, rope: RopeConfig
) -> NDArray[np.float64]:
    def pair_that_turns(times: float) -> float:
        # the (fractional) pair that makes so many turns within the original context
        wavelength = rope.original_max_len / (2 * math.pi * times)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by 0
    stretch = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return plain * (1 - stretch + stretch / rope.factor)


def _dynamic_frequencies(
    places: Float[Array, "tokens 1"], head_dim: int, rope: RopeConfig
) -> Float[Array, "tokens half"]:
    # A token at p is turned as in a sequence of p + 1 tokens, whatever chunk it comes in: what
    # token-by-token decoding gives, and the only reading by which chunking changes nothing.
    length = jnp.maximum(places + 1, float(rope.original_max_len))
    grown = rope.factor * length / rope.original_max_len - (rope.factor - 1)
    log_theta = math.log(rope.theta) + jnp.log(grown) * (head_dim / (head_dim - 2))
    exponents = jnp.asarray(-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    return jnp.exp(log_theta * exponents[None, :])
