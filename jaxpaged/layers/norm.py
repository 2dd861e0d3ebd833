"""Root mean square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Divide by the root mean square over the last axis, then scale.

    Weight and arithmetic are float32, the result has x's type. `scale` is the whole factor: a
    checkpoint that stores it less one gets its one when it is loaded.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(self, size: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)
