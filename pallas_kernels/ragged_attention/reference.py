"""What ragged paged attention means: gather, mask, softmax, sum, for one token at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.spec import AttentionSpec


def ragged_paged_attention_reference(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    sinks: Float[Array, " heads"] | None,
    *,
    spec: AttentionSpec,
) -> Float[Array, "tokens heads head_dim"]:
    """The definition of `ragged_paged_attention`: slow, and right by inspection.

    Every token reads all of its row's page table, so cost and memory follow the table's width.
    Einsum letters: K kv_heads, G group, L kv, H head_dim.
    """
    _, kv_heads, _, head_dim = k_pages.shape
    tokens, heads, _ = q.shape
    float32, exact = jnp.float32, lax.Precision.HIGHEST

    def one_token(query_and_place):
        query, token = query_and_place
        # the last row that begins at or before the token; empty rows before it share its beginning
        row = jnp.searchsorted(cu_q_lens, token, side="right") - 1
        row = jnp.minimum(row, kv_lens.shape[0] - 1)
        # the row's last query stands at kv_len - 1
        position = kv_lens[row] - (cu_q_lens[row + 1] - token)
        page_ids = page_table[row]
        k = k_pages[page_ids].swapaxes(0, 1).reshape(kv_heads, -1, head_dim).astype(float32)
        v = v_pages[page_ids].swapaxes(0, 1).reshape(kv_heads, -1, head_dim).astype(float32)

        place = jnp.arange(k.shape[1])
        visible = (place <= position) & (token < cu_q_lens[-1])
        if spec.window is not None:
            visible &= place > position - spec.window
        v = jnp.where(
            visible[None, :, None], v, 0
        )  # a stale place may hold NaN, and 0 * NaN is NaN

        query = query.reshape(kv_heads, -1, head_dim).astype(float32)
        logits = jnp.einsum("KGH,KLH->KGL", query, k, precision=exact) * spec.scale
        if spec.soft_cap is not None:
            logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
        logits = jnp.where(visible[None, None, :], logits, -jnp.inf)
        weights = jnp.where(visible.any(), _softmax(logits, sinks), 0)
        return jnp.einsum("KGL,KLH->KGH", weights, v, precision=exact).reshape(heads, head_dim)

    return lax.map(one_token, (q, jnp.arange(tokens))).astype(q.dtype)


def _softmax(
    logits: Float[Array, "kv_heads group kv"], sinks: Float[Array, " heads"] | None
) -> Float[Array, "kv_heads group kv"]:
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    # a sink is one more logit, whose weight is then thrown away
    sink = sinks.astype(jnp.float32).reshape(*logits.shape[:2], 1)
    return jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
