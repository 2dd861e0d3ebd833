"""Products in parts on a machine without a GPU."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def in_two_parts(x: Array, weight: Array) -> Array:
    """What `product_in_parts` gives, with NaN in three rows past the tokens."""
    halves = [x[:, part::2] @ weight[:, part::2].T for part in range(2)]
    parts = jnp.stack(halves).astype(jnp.float32)
    return jnp.pad(parts, ((0, 0), (0, 3), (0, 0)), constant_values=np.nan)
