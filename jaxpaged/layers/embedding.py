"""Token embedding and the logits."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.layers.linear import contract_last, weight
from jaxpaged.sharding import is_split, local_ids, sum_shards


class Embedding(nnx.Module):
    """A row per token, and the product with every row.

    `scale` is rounded to the weights' type before it is used, as the models were trained.
    """

    def __init__(self, config: ModelConfig, *, scale: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.table = weight(rngs, config.vocab, config.embed, axes=("vocab", "embed"), dtype=dtype)
        self.scale = scale

    def __call__(self, token_ids: Int32[Array, " tokens"]) -> Float[Array, "tokens embed"]:
        """Look up `token_ids`, which the host has bounded; one all-reduce where rows are split."""
        table = self.table[...]
        if is_split():
            places = local_ids(token_ids, len(table))
            x = sum_shards(table.at[places].get(mode="fill", fill_value=0))
        else:
            x = table.at[token_ids].get(mode="clip")
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, x.dtype)

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Score every token, unscaled, in float32."""
        return contract_last(hidden, self.table[...], jnp.float32)
