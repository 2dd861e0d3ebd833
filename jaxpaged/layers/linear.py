"""Matrix products with weights stored as `[out, in]`, as checkpoints store them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def weight(rngs: nnx.Rngs, *shape: int, dtype: DTypeLike) -> nnx.Param:
    """Make a weight whose last axis is contracted, scaled so that outputs keep their variance."""
    scale = math.sqrt(3 / shape[-1])
    return nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -scale, scale))


def zeros(*shape: int, dtype: DTypeLike) -> nnx.Param:
    """Make a bias."""
    return nnx.Param(jnp.zeros(shape, dtype))


def linear(
    x: Float[Array, "tokens in"], weight: nnx.Param, bias: nnx.Param | None
) -> Float[Array, "tokens out"]:
    """Multiply by `weight` and add `bias`; the leading axes of `weight` come out as one.

    Sums are in float32 and stored in x's type.
    """
    w = weight[...].reshape(-1, x.shape[-1])
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    return y if bias is None else y + bias[...].reshape(1, -1)
