"""BERT-type encoders over texts that lie end to end in rows of one length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import Activation, EncoderConfig
from jaxpaged.layers.linear import linear, weight, zeros
from jaxpaged.layers.norm import LayerNorm

MASKED = -1e30  # finite, so that a row of nothing but padding gives no NaN
_QKV = ("kv_heads", "blocks", "head_dim", "embed")
_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextRows:
    """Several texts a row, end to end; a text never crosses a row's end.

    Padding may stand anywhere, as tokens of text -1: it sees only other padding of its row.
    """

    token_ids: Int32[Array, "rows row_len"]
    positions: Int32[Array, "rows row_len"]  # place of each token in its own text, from 0
    token_types: Int32[Array, "rows row_len"]
    texts: Int32[Array, "rows row_len"]  # number of the text that a token belongs to


class SelfAttention(nnx.Module):
    """Attention of every token to all of its text.

    A token whose value is not finite gets NaN, and other texts of its row nothing of it.
    Einsum letters: R rows, Q and L places in a row, N heads, H head_dim. Softmax in float32.
    """

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        c = config
        self.heads, self.head_dim = c.heads, c.head_dim
        self.qkv = weight(rngs, c.heads, 3, c.head_dim, c.embed, axes=_QKV, dtype=dtype)
        self.qkv_bias = zeros(c.heads, 3, c.head_dim, axes=_QKV[:3], dtype=dtype)
        self.out = weight(rngs, c.embed, c.embed, axes=("embed", "heads"), dtype=dtype)
        self.out_bias = zeros(c.embed, axes=("embed",), dtype=dtype)

    def __call__(
        self, x: Float[Array, "tokens embed"], texts: Int32[Array, "rows row_len"]
    ) -> Float[Array, "tokens embed"]:
        qkv = linear(x, self.qkv, self.qkv_bias)
        qkv = qkv.reshape(*texts.shape, self.heads, 3, self.head_dim)
        q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        logits = jnp.einsum("RQNH,RLNH->RNQL", q, k, preferred_element_type=jnp.float32)
        is_seen = texts[:, None, :, None] == texts[:, None, None, :]
        logits = jnp.where(is_seen, logits * self.head_dim**-0.5, MASKED)
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        is_good = jnp.isfinite(v).all(axis=(2, 3), keepdims=True)
        v = jnp.where(is_good, v, 0)  # 0 * NaN is NaN
        seen = jnp.einsum("RNQL,RLNH->RQNH", weights, v, preferred_element_type=x.dtype)
        seen = jnp.where(is_good, seen, jnp.nan)
        return linear(seen.reshape(x.shape), self.out, self.out_bias)


class EncoderLayer(nnx.Module):
    """Attention and feed-forward, each added to what came in and normed after.

    Source: Devlin et al. 2018 (arXiv 1810.04805).
    """

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        c = config
        self.attention = SelfAttention(c, dtype=dtype, rngs=rngs)
        self.attention_norm = LayerNorm(c.embed, eps=c.norm_eps)
        self.up = weight(rngs, c.ffn, c.embed, axes=("ffn", "embed"), dtype=dtype)
        self.up_bias = zeros(c.ffn, axes=("ffn",), dtype=dtype)
        self.down = weight(rngs, c.embed, c.ffn, axes=("embed", "ffn"), dtype=dtype)
        self.down_bias = zeros(c.embed, axes=("embed",), dtype=dtype)
        self.feed_forward_norm = LayerNorm(c.embed, eps=c.norm_eps)
        self.activation: Activation = c.activation

    def __call__(
        self, x: Float[Array, "tokens embed"], texts: Int32[Array, "rows row_len"]
    ) -> Float[Array, "tokens embed"]:
        x = self.attention_norm(x + self.attention(x, texts))
        inner = _ACTIVATIONS[self.activation](linear(x, self.up, self.up_bias))
        return self.feed_forward_norm(x + linear(inner, self.down, self.down_bias))


class Encoder(nnx.Module):
    """Token ids in, hidden states out. `dtype` is that of weights and activations."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        c = config
        self.tokens = weight(rngs, c.vocab, c.embed, axes=("vocab", "embed"), dtype=dtype)
        self.positions = weight(rngs, c.max_len, c.embed, axes=("positions", "embed"), dtype=dtype)
        self.types = weight(
            rngs, c.token_types, c.embed, axes=("token_types", "embed"), dtype=dtype
        )
        self.norm = LayerNorm(c.embed, eps=c.norm_eps)
        self.layers = nnx.List(
            [EncoderLayer(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers)]
        )
        self.classifier = Classifier(c, dtype=dtype, rngs=rngs) if c.num_labels else None

    def __call__(self, batch: TextRows) -> Float[Array, "tokens embed"]:
        """Compute the hidden state of every token, row after row."""
        x = (
            self.tokens[...].at[batch.token_ids.ravel()].get(mode="clip")
            + self.positions[...].at[batch.positions.ravel()].get(mode="clip")
            + self.types[...].at[batch.token_types.ravel()].get(mode="clip")
        )
        x = self.norm(x)
        for layer in self.layers:
            graphdef, weights = nnx.split(layer)
            x = _run_layer(graphdef, nnx.to_pure_dict(weights), x, batch.texts)
        return x


class Classifier(nnx.Module):
    """BERT's pooler over a text's first token, and a logit a label."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        c = config
        self.pooler = weight(rngs, c.embed, c.embed, axes=("embed", "embed"), dtype=dtype)
        self.pooler_bias = zeros(c.embed, axes=("embed",), dtype=dtype)
        self.out = weight(rngs, c.num_labels, c.embed, axes=("labels", "embed"), dtype=dtype)
        self.out_bias = zeros(c.num_labels, axes=("labels",), dtype=dtype)

    def __call__(self, first: Float[Array, "texts embed"]) -> Float[Array, "texts labels"]:
        pooled = jnp.tanh(linear(first, self.pooler, self.pooler_bias))
        return linear(pooled, self.out, self.out_bias)


# layers have equal graphdefs, so they share one trace and one lowered function
@jax.jit(static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef,
    params: Params,
    x: Float[Array, "tokens embed"],
    texts: Int32[Array, "rows row_len"],
) -> Float[Array, "tokens embed"]:
    return nnx.merge(graphdef, params)(x, texts)
