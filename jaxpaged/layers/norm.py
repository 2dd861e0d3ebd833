"""Root mean square normalisation, and layer normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.layers.linear import Addend
from pallas_kernels.fused_norm import add_rms_norm, rms_norm


class RMSNorm(nnx.Module):
    """Divide by the root mean square over the last axis, then scale.

    Weight and arithmetic are float32, the result has x's type. `scale` is the whole factor: a
    checkpoint that stores it less one gets its one when it is loaded.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(self, size: int, *, eps: float, axis: str = "embed"):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return rms_norm(x, self.scale[...], eps=self.eps)

    def of_sum(
        self, residual: Float[Array, "tokens size"], added: Addend
    ) -> tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]]:
        """Return the normed sum, and the sum, which is the new residual."""
        return add_rms_norm(added, residual, self.scale[...], eps=self.eps)


class LayerNorm(nnx.Module):
    """Subtract the mean over the last axis, divide by the standard deviation, scale and shift.

    Weights and arithmetic are float32, the result has x's type.
    Source: Ba et al. 2016 (arXiv 1607.06450).
    """

    def __init__(self, size: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=("embed",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=("embed",))
        self.eps = eps

    def __call__(self, x: Float[Array, "tokens size"]) -> Float[Array, "tokens size"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.eps)
        return (normed * self.scale[...][None] + self.bias[...][None]).astype(x.dtype)
