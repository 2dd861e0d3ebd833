"""Grouped-query attention over the page pool, and the hook for other ways to attend."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.arrays import KVPages, RaggedBatch
from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.layers.linear import Addend, linear, linear_to_add, weight, zeros
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Angles
from pallas_kernels.ragged_attention import ragged_paged_attention
from pallas_kernels.rope_write import rotate_and_write
from pallas_kernels.spec import AttentionSpec


@runtime_checkable
class AttentionOp(Protocol):
    """How queries attend to the KV of their own sequence: the researcher's hook.

    `q` is rotated and not scaled; the KV of this step's tokens is in `pages` already. The result
    has q's type, and rows of padding tokens may hold any finite values. `sinks`, one more logit a
    head in the softmax's denominator, is passed only by models that have them.
    """

    def __call__(
        self,
        q: Float[Array, "tokens heads head_dim"],
        pages: KVPages,
        batch: RaggedBatch,
        *,
        spec: AttentionSpec,
        sinks: Float[Array, " heads"] | None = None,
    ) -> Float[Array, "tokens heads head_dim"]: ...


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    pages: KVPages,
    batch: RaggedBatch,
    *,
    spec: AttentionSpec,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attend causally through the page table: the `AttentionOp` of every model unless told."""
    return ragged_paged_attention(
        q,
        pages.k,
        pages.v,
        batch.page_table,
        batch.kv_lens,
        batch.cu_q_lens,
        sinks,
        spec=spec,
        decode_only=batch.is_decode_only,
    )


class Attention(nnx.Module):
    """Project, rotate, write KV, attend, project back.

    What it returns may come in parts, as that of `FeedForward`.

    `qkv` holds one block per KV head: its group of query heads, then its key, then its value, so
    that a split by KV heads is a split of the first axis.
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
        c = config
        self.group, self.head_dim = c.heads // c.kv_heads, c.head_dim
        blocks = (c.kv_heads, self.group + 2, c.head_dim)
        axes = ("kv_heads", "blocks", "head_dim", "embed")
        self.qkv = weight(rngs, *blocks, c.embed, axes=axes, dtype=dtype)
        width = c.heads * c.head_dim
        self.out = weight(rngs, c.embed, width, axes=("embed", "heads"), dtype=dtype)
        self.qkv_bias = zeros(*blocks, axes=axes[:3], dtype=dtype) if c.qkv_bias else None
        self.out_bias = zeros(c.embed, axes=("embed",), dtype=dtype) if c.output_bias else None
        self.q_norm = RMSNorm(c.head_dim, eps=c.norm_eps, axis="head_dim") if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, eps=c.norm_eps, axis="head_dim") if c.qk_norm else None
        self.norm_eps = c.norm_eps
        self.sinks = (
            zeros(c.heads, axes=("heads",), dtype=jnp.float32) if c.attention_sinks else None
        )
        self.spec = AttentionSpec(c.scale, window=kind.window, soft_cap=c.attention_soft_cap)
        self.attend = attend
        self.is_normed = c.post_norms

    def __call__(
        self, x: Float[Array, "tokens embed"], angles: Angles, pages: KVPages, batch: RaggedBatch
    ) -> tuple[Addend, KVPages]:
        seen, pages = self.attend_to(linear(x, self.qkv, None), angles, pages, batch)
        seen = seen.astype(x.dtype)
        return linear_to_add(seen, self.out, self.out_bias, is_normed=self.is_normed), pages

    def attend_to(
        self,
        qkv: Float[Array, "tokens columns"],
        angles: Angles,
        pages: KVPages,
        batch: RaggedBatch,
    ) -> tuple[Float[Array, "tokens heads"], KVPages]:
        """What the heads see, from the projection without its bias, and the pages with its KV."""
        tokens = qkv.shape[0]
        qkv = qkv.reshape(tokens, -1, self.group + 2, self.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.scale[...], self.k_norm.scale[...]
        # KV is written before anyone attends, because a chunk's tokens see each other
        q, k_pages, v_pages = rotate_and_write(
            qkv,
            *angles,
            pages.k,
            pages.v,
            batch.slot_mapping,
            norms=norms,
            eps=self.norm_eps,
            bias=None if self.qkv_bias is None else self.qkv_bias[...],
        )
        pages = KVPages(k_pages, v_pages)
        more = {} if self.sinks is None else {"sinks": self.sinks[...]}
        seen = self.attend(q, pages, batch, spec=self.spec, **more)
        return seen.reshape(tokens, -1), pages
