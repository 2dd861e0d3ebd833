"""The gated feed-forward block."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.config.architecture import Activation, ModelConfig
from jaxpaged.layers.linear import (
    Addend,
    linear,
    linear_of_parts,
    linear_to_add,
    nothing_to_add,
    weight,
    zeros,
)
from pallas_kernels.gated import gated, gated_product, is_one_kernel


class FeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`, gate and up being one product.

    What it returns is to be added to the residual, by a norm of the sum: it may come in parts, but
    for models that norm it before.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        c = config
        axes = ("gate_up", "ffn", "embed")
        self.gate_up = weight(rngs, 2, c.ffn, c.embed, axes=axes, dtype=dtype)
        self.down = weight(rngs, c.embed, c.ffn, axes=("embed", "ffn"), dtype=dtype)
        self.gate_up_bias = zeros(2, c.ffn, axes=axes[:2], dtype=dtype) if c.mlp_bias else None
        self.down_bias = zeros(c.embed, axes=("embed",), dtype=dtype) if c.mlp_bias else None
        self.activation: Activation = c.activation
        self.is_normed = c.post_norms

    def __call__(self, x: Float[Array, "tokens embed"]) -> Addend:
        multiply = linear_of_parts if self.is_normed else linear_to_add
        return multiply(self._gated(x), self.down, self.down_bias)

    def nothing(self, x: Float[Array, "tokens embed"]) -> Addend:
        """Zeros in the form of what is returned for x."""
        if self.is_normed or self.down_bias is not None:
            return jnp.zeros_like(x)
        return nothing_to_add(x, self.down)

    def _gated(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens ffn"]:
        weight, activation = self.gate_up[...], self.activation
        if self.gate_up_bias is None and is_one_kernel(x, weight, activation=activation):
            return gated_product(x, weight, activation=activation)
        return gated(linear(x, self.gate_up, self.gate_up_bias), activation=activation)
