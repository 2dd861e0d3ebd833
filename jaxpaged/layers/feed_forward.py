"""The gated feed-forward block."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.config.architecture import Activation, ModelConfig
from jaxpaged.layers.linear import (
    Addend,
    linear,
    linear_to_add,
    weight,
    zeros,
)
from pallas_kernels.gated import gated
from pallas_kernels.products import gated_product, gates_in_product


class FeedForward(nnx.Module):
    """`down(act(gate(x)) * up(x))`, gate and up being one product.

    What it returns is to be added to the residual, by a norm of the sum. So it may come in parts,
    unless the model norms it first.

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
        return self._project_down(self._gated(x))

    def nothing(self, x: Float[Array, "tokens embed"]) -> Addend:
        """Zeros in the form of what is returned for x."""
        inner = jax.ShapeDtypeStruct((len(x), self.down.shape[-1]), x.dtype)
        form = jax.eval_shape(self._project_down, inner)
        return jnp.zeros(form.shape, form.dtype)

    def _project_down(self, inner: Float[Array, "tokens ffn"]) -> Addend:
        return linear_to_add(inner, self.down, self.down_bias, is_normed=self.is_normed)

    def _gated(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens ffn"]:
        weight, activation = self.gate_up[...], self.activation
        if self.gate_up_bias is None and gates_in_product(x, weight, activation=activation):
            return gated_product(x, weight, activation=activation)
        return gated(linear(x, self.gate_up, self.gate_up_bias), activation=activation)
