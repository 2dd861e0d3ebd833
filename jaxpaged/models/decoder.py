"""The one decoder: every family is a configuration of it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxpaged.arrays import DeviceState, KVPages, Params, RaggedBatch
from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.layers.attention import Attention, AttentionOp
from jaxpaged.layers.embedding import Embedding
from jaxpaged.layers.feed_forward import FeedForward
from jaxpaged.layers.linear import Addend
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Angles, rope_angles
from jaxpaged.models.one_row import is_one_row, run_layers_of_one_row
from jaxpaged.sharding import hide_padding, spec_of
from pallas_kernels.fused_norm import whole


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each after a norm and added to what came in.

    What the last block adds is passed on beside the residual `x`, so that one kernel adds it and
    norms the sum for the next.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        attend: AttentionOp,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        norm = partial(RMSNorm, config.embed, eps=config.norm_eps)
        self.attention_norm = norm()
        self.attention = Attention(config, kind, attend, dtype=dtype, rngs=rngs)
        self.feed_forward_norm = norm()
        self.feed_forward = FeedForward(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.feed_forward_post_norm = norm() if config.post_norms else None

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        added: Addend,
        angles: Angles,
        pages: KVPages,
        batch: RaggedBatch,
    ) -> tuple[Float[Array, "tokens embed"], Addend, KVPages]:
        normed, x = self.attention_norm.of_sum(x, added)
        added, pages = self.attention(normed, angles, pages, batch)
        if self.attention_post_norm is not None:
            added = self.attention_post_norm(added)
        normed, x = self.feed_forward_norm.of_sum(x, added)
        added = self.feed_forward(normed)
        if self.feed_forward_post_norm is not None:
            added = self.feed_forward_post_norm(added)
        return x, added, pages


class Decoder(nnx.Module):
    """Token ids in, hidden states out; KV goes to the page pool on the way.

    Has no state beside its weights. `dtype` is that of weights and activations.
    """

    def __init__(
        self, config: ModelConfig, attend: AttentionOp, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.config = config
        self.embedding = Embedding(config, scale=config.embed_scale, dtype=dtype, rngs=rngs)
        layer = partial(DecoderLayer, config, attend=attend, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer(kind) for kind in config.layer_kinds])
        self.norm = RMSNorm(config.embed, eps=config.norm_eps)
        tied = config.tied_embeddings
        self.lm_head = None if tied else Embedding(config, scale=1.0, dtype=dtype, rngs=rngs)

    def __call__(
        self, batch: RaggedBatch, state: DeviceState, local: RaggedBatch | None = None
    ) -> tuple[Float[Array, "tokens embed"], DeviceState]:
        """Compute the normed hidden state of every token and write its KV.

        Hidden states of padding tokens mean nothing. `local` is the batch with the page table of
        layers with a window, where they have their own.
        """
        x = self.embedding(input_ids(batch, state.last_token_ids))
        return self.finish(x, batch, state, local)

    def finish(
        self,
        x: Float[Array, "tokens embed"],
        batch: RaggedBatch,
        state: DeviceState,
        local: RaggedBatch | None = None,
    ) -> tuple[Float[Array, "tokens embed"], DeviceState]:
        """The same from what the layers before these gave."""
        x, added, pages = self._run_layers(x, batch, state.kv_pages, local)
        return self.norm.of_sum(x, added)[0], replace(state, kv_pages=pages)

    def pass_on(
        self,
        given: Int32[Array, " slots"] | Float[Array, "tokens embed"],
        batch: RaggedBatch,
        kv_pages: tuple[KVPages, ...],
        local: RaggedBatch | None = None,
    ) -> tuple[Float[Array, "tokens embed"], tuple[KVPages, ...]]:
        """What these layers give to those after them, see `models/stages.py`.

        `given` are `last_token_ids` where the first layer is among these, else hidden states.
        """
        x = given
        if self.embedding is not None:
            x = self.embedding(input_ids(batch, given))
        x, added, pages = self._run_layers(x, batch, kv_pages, local)
        return x + whole(added, x), pages

    def _run_layers(
        self,
        x: Float[Array, "tokens embed"],
        batch: RaggedBatch,
        kv_pages: tuple[KVPages, ...],
        local: RaggedBatch | None,
    ) -> tuple[Float[Array, "tokens embed"], Addend, tuple[KVPages, ...]]:
        """The residual, what the last layer adds to it, and the pages with this batch's KV."""
        local = batch if local is None else local
        kinds, head_dim = self.config.layer_kinds, self.config.head_dim
        ropes = dict.fromkeys(kind.rope for kind in kinds)
        angles = {rope: rope_angles(batch.positions, head_dim, rope) for rope in ropes}
        arguments = [
            (angles[kind.rope], pages, batch if kind.window is None else local)
            for kind, pages in zip(kinds, kv_pages, strict=True)
        ]
        if is_one_row(self.layers, x):
            return run_layers_of_one_row(self.layers, x, arguments)
        added = self.layers[0].feed_forward.nothing(x)  # so that the first layer shares its trace
        written = []
        for layer, mine in zip(self.layers, arguments, strict=True):
            graphdef, weights = nnx.split(layer)
            params = nnx.to_pure_dict(weights)
            x, added, pages = _run_layer(graphdef, params, x, added, *mine)
            written.append(pages)
        return x, added, tuple(written)

    def unembed(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Turn hidden states into logits, float32, the model's soft cap applied."""
        head = self.embedding if self.lm_head is None else self.lm_head
        logits = head.logits(hidden)
        cap = self.config.logit_soft_cap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return hide_padding(logits, self.config.vocab_padding)


# Layers of one kind have equal graphdefs, so they share one trace and one lowered function.
@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef,
    params: Params,
    x: Float[Array, "tokens embed"],
    added: Addend,
    angles: Angles,
    pages: KVPages,
    batch: RaggedBatch,
) -> tuple[Float[Array, "tokens embed"], Addend, KVPages]:
    return nnx.merge(graphdef, params)(x, added, angles, pages, batch)


def input_ids(
    batch: RaggedBatch, last_token_ids: Int32[Array, " slots"]
) -> Int32[Array, " tokens"]:
    """Take each token from the batch, or from `last_token_ids` where the host has not read it."""
    if batch.is_decode_only:
        slots = batch.seq_slots  # row s owns token s
    else:
        places = jnp.arange(batch.token_ids.shape[0], dtype=batch.cu_q_lens.dtype)
        rows = jnp.searchsorted(batch.cu_q_lens, places, side="right") - 1
        slots = batch.seq_slots.at[rows].get(mode="clip")
    return jnp.where(batch.from_last, last_token_ids[slots], batch.token_ids)


def device_state_shapes(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    max_num_seqs: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    num_local_pages: int = 0,
) -> DeviceState:
    """What `init_device_state` makes, as shapes with their shardings.

    `num_local_pages` are those of layers with a window, where they have their own.
    """

    def shape(dtype: DTypeLike, **sizes: int) -> Any:
        sharding = None if mesh is None else NamedSharding(mesh, spec_of(tuple(sizes)))
        return jax.ShapeDtypeStruct(tuple(sizes.values()), dtype, sharding=sharding)

    def pool(kind: LayerKind) -> KVPages:
        is_local = kind.window is not None and num_local_pages > 0
        count = num_local_pages if is_local else num_pages
        page = {"kv_heads": config.kv_heads, "places": page_size, "head_dim": config.head_dim}
        one = shape(dtype, pages=count, **page)
        return KVPages(one, one)

    slots = max_num_seqs + 1
    return DeviceState(
        kv_pages=tuple(pool(kind) for kind in config.layer_kinds),
        last_token_ids=shape(jnp.int32, slots=slots),
        output_counts=shape(jnp.int16, slots=slots, vocab=config.vocab),
    )


def init_device_state(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    max_num_seqs: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> DeviceState:
    """Make an empty page pool and the slots of `max_num_seqs` sequences, plus the spare one.

    `num_pages` counts the null page; `dtype` is that of the KV; `config` is as it is laid out for
    `mesh`.
    """
    shapes = device_state_shapes(config, num_pages, page_size, max_num_seqs, dtype, mesh)
    return empty_like(shapes)


def empty_like[T](state: T) -> T:
    """Zeros in the place of shapes, or of arrays, whose memory may be gone."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), state)
