"""What a row's way through a layer means."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.fused_norm.reference import add_rms_norm_reference
from pallas_kernels.gated.reference import gated_reference


class BlockWeights(NamedTuple):
    """Weights from attention to the next layer's queries; the last two are that layer's."""

    out: Float[Array, "embed heads"]
    feed_forward_scale: Float[Array, " embed"]  # float32
    gate_up: Float[Array, "two ffn embed"]
    down: Float[Array, "embed ffn"]
    attention_scale: Float[Array, " embed"] | None = None  # float32
    qkv: Float[Array, "columns embed"] | None = None

    @property
    def products(self) -> list[jax.Array]:
        """The weights that are multiplied, [columns, inner], in order."""
        gate_up = self.gate_up.reshape(-1, self.gate_up.shape[-1])
        last = [] if self.qkv is None else [self.qkv]
        return [self.out, gate_up, self.down, *last]


def one_row_reference(
    seen: Float[Array, "1 heads"],
    residual: Float[Array, "1 embed"],
    weights: BlockWeights,
    *,
    activation: str,
    eps: float,
) -> tuple[Float[Array, "1 embed"], Float[Array, "1 columns"] | Float[Array, "1 1 embed"]]:
    """The definition of `one_row_block`, its sums of one part."""
    out, gate_up, down, *qkv = weights.products

    def times(x, weight, dtype=seen.dtype):
        dimensions = (((1,), (1,)), ((), ()))
        sums = lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)
        return sums.astype(dtype)

    scale = weights.feed_forward_scale
    normed, residual = add_rms_norm_reference(times(seen, out), residual, scale, eps=eps)
    both = times(normed, gate_up, jnp.float32)
    inner = gated_reference(both, activation=activation).astype(seen.dtype)
    if weights.attention_scale is None:
        return residual, times(inner, down, jnp.float32)[None]
    scale = weights.attention_scale
    normed, residual = add_rms_norm_reference(times(inner, down), residual, scale, eps=eps)
    return residual, times(normed, qkv[0])
