"""What a gated activation means."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gated_reference(
    both: Float[Array, "rows both"], *, activation: str
) -> Float[Array, "rows ffn"]:
    """The definition of `gated`."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    if activation == "silu":
        active = jax.nn.silu(gate)
    else:
        active = jax.nn.gelu(gate, approximate=activation == "gelu_tanh")
    return (active * up).astype(both.dtype)
