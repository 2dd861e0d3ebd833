"""The compiled programs of a model that embeds: one a bucket, the state donated."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.arrays import DeviceState, Params, RaggedBatch
from jaxpaged.config.pooling import PoolingModel
from jaxpaged.core.pooling import (
    PoolingBucket,
    RowBucket,
    Shapes,
    TextPacker,
    TokenBucket,
    buffer_size,
    field_places,
)
from jaxpaged.engine.compile_clock import CompileClock
from jaxpaged.engine.executables import ExecutableStore
from jaxpaged.models.encoder import TextRows

MAX_THREADS = 16


class PoolingPrograms:
    """Finished programs by bucket: `program(params, state, packed) -> (state, results)`."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        model: PoolingModel,
        params: Params,
        state: Any,
        packer: TextPacker,
        store: ExecutableStore,
    ):
        self._graphdef, self._model, self._store = graphdef, model, store
        self._arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state)
        )
        self._buckets = packer.buckets
        self._finished: dict[str, Any] = {}
        self.clock = CompileClock()
        self.num_compilations = 0

    def get(self, bucket: PoolingBucket) -> Any:
        """The bucket's program, compiled now if it must be."""
        if bucket.name not in self._finished:
            with self.clock.running():
                self._finished[bucket.name] = self._store.load(bucket.name) or self._compile(bucket)
        return self._finished[bucket.name]

    def _compile(self, bucket: PoolingBucket) -> Any:
        function = make_function(self._graphdef, self._model, bucket)
        packed = jax.ShapeDtypeStruct((buffer_size(bucket.shapes),), jnp.int32)
        lowered = jax.jit(function, donate_argnums=1).lower(*self._arguments, packed)
        compiled = lowered.compile()
        self.num_compilations += 1
        self._store.save(bucket.name, compiled)
        return compiled

    def warm_up(self) -> None:
        """Load or compile all of them."""
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(self.get, self._buckets))


def make_function(
    graphdef: nnx.GraphDef, model: PoolingModel, bucket: PoolingBucket
) -> Callable[[Params, Any, Array], tuple[Any, Array]]:
    """What a bucket's program computes: f32 results [texts, size], those of no text arbitrary."""

    def encoded(params: Params, state: Any, packed: Int32[Array, " words"]):
        fields = cut(packed, bucket.shapes)
        texts, first = fields["texts"], fields["first"]
        batch = TextRows(fields["token_ids"], fields["positions"], fields["token_types"], texts)
        encoder = nnx.merge(graphdef, params)
        hidden = encoder(batch)
        own = texts.ravel()[None] == jnp.arange(len(first))[:, None]
        is_good = jnp.isfinite(hidden).all(axis=-1)
        if encoder.classifier is not None:
            results = encoder.classifier(hidden[first]).astype(jnp.float32)
        else:
            finite = jnp.where(is_good[:, None], hidden, 0)  # a mean multiplies others' by 0
            results = finished(model, pooled(model, finite, own, first))
        is_broken = (own & ~is_good[None]).any(axis=1)
        return state, jnp.where(is_broken[:, None], jnp.nan, results)

    def decoded(params: Params, state: DeviceState, packed: Int32[Array, " words"]):
        fields = cut(packed, bucket.shapes)
        first_page = fields.pop("first_page")
        num_tokens, num_texts = len(fields["token_ids"]), len(fields["kv_lens"])
        last = jnp.maximum(fields["cu_q_lens"][1:] - 1, 0)
        page_size = state.kv_pages[0].k.shape[2]
        batch = RaggedBatch(
            **fields,
            page_table=page_tables(first_page, fields["kv_lens"], pages_per_text, page_size),
            seq_slots=jnp.zeros(num_texts, jnp.int32),
            from_last=jnp.zeros(num_tokens, bool),
            logit_rows=last,
            is_decode_only=False,
        )
        hidden, state = nnx.merge(graphdef, params)(batch, state)
        return state, finished(model, hidden[last])

    if isinstance(bucket, RowBucket):
        return encoded
    assert isinstance(bucket, TokenBucket)
    pages_per_text = bucket.pages_per_text
    return decoded


def page_tables(
    first_page: Int32[Array, " texts"],
    kv_lens: Int32[Array, " texts"],
    pages_per_text: int,
    page_size: int,
) -> Int32[Array, "texts pages"]:
    """Page tables of texts whose pages follow one another; the rest names the null page."""
    place = jnp.arange(pages_per_text, dtype=jnp.int32)[None]
    is_used = place * page_size < kv_lens[:, None]
    return jnp.where(is_used, first_page[:, None] + place, 0)


def cut(packed: Int32[Array, " words"], shapes: Shapes) -> dict[str, Array]:
    """The fields of a buffer by name."""
    return {name: packed[at].reshape(shapes[name]) for name, at in field_places(shapes).items()}


def pooled(
    model: PoolingModel,
    hidden: Float[Array, "tokens embed"],
    own: Array,
    first: Int32[Array, " texts"],
) -> Float[Array, "texts embed"]:
    """One hidden state a text; `own` says which tokens are whose."""
    if model.pooling == "cls":
        return hidden[first]
    lengths = own.sum(axis=1, dtype=jnp.int32)
    if model.pooling == "last":
        return hidden[first + jnp.maximum(lengths - 1, 0)]
    wide = hidden.astype(jnp.float32)
    sums = jnp.einsum("ST,TD->SD", own.astype(jnp.float32), wide, precision="highest")
    return sums / jnp.maximum(lengths, 1)[:, None].astype(jnp.float32)


def finished(
    model: PoolingModel, vectors: Float[Array, "texts embed"]
) -> Float[Array, "texts embed"]:
    """In float32, and of length 1 where the model wants it."""
    vectors = vectors.astype(jnp.float32)
    if not model.normalize:
        return vectors
    lengths = jnp.sqrt(jnp.square(vectors).sum(axis=-1, keepdims=True))
    return vectors / jnp.maximum(lengths, 1e-12)
