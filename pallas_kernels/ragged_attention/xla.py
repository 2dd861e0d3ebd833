"""Ragged paged attention in plain XLA: loops whose length follows the KV that is really there.

Rows with one query go through `_attend_singles`: sorted by length, in groups that walk their KV
together. Longer rows go through `_attend_runs`: blocks of neighbouring queries of one row, each
from its window's beginning to its causal end. Both keep a running softmax.

Einsum letters: S seqs, T tokens, K kv_heads, G group, L kv, H head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.spec import AttentionSpec

MASKED = -1e30  # finite, so that MASKED - MASKED is 0 and not NaN


class _Blocks(NamedTuple):
    """Sizes of what one turn of a loop works on."""

    rows: int  # single queries that walk their KV together
    q: int  # neighbouring queries of a longer row
    kv: int  # KV tokens


_CPU_BLOCKS = _Blocks(rows=4, q=32, kv=128)  # measured: docs/decisions/0004-xla-attention.md
_GPU_BLOCKS = _Blocks(rows=64, q=128, kv=256)  # 33 MB of gathered K at 8 KV heads of 128, bf16


class _Softmax(NamedTuple):
    """A softmax-weighted sum in progress: largest logit, sum of weights, weighted values."""

    peak: Float[Array, "rows kv_heads queries"]
    mass: Float[Array, "rows kv_heads queries"]
    total: Float[Array, "rows kv_heads queries head_dim"]


def ragged_paged_attention_xla(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    sinks: Float[Array, " heads"] | None,
    *,
    spec: AttentionSpec,
    decode_only: bool,
) -> Float[Array, "tokens heads head_dim"]:
    """`ragged_paged_attention` on any device; the width of the page table costs nothing."""
    pages = _Pages(k_pages, v_pages, page_table)
    if decode_only:
        return _attend_singles(q, pages, kv_lens, sinks, spec)

    tokens = q.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_single = q_lens == 1
    places = jnp.minimum(cu_q_lens[:-1], tokens - 1)
    singles = _attend_singles(q[places], pages, jnp.where(is_single, kv_lens, 0), sinks, spec)
    out = jnp.zeros_like(q).at[jnp.where(is_single, places, tokens)].set(singles, mode="drop")
    return _attend_runs(q, out, pages, kv_lens, cu_q_lens, sinks, spec)


class _Pages(NamedTuple):
    """One layer's KV and who owns which page of it."""

    k: Float[Array, "pages kv_heads page_size head_dim"]
    v: Float[Array, "pages kv_heads page_size head_dim"]
    table: Int32[Array, "seqs pages_per_seq"]


def _blocks() -> _Blocks:
    return _CPU_BLOCKS if jax.default_backend() == "cpu" else _GPU_BLOCKS


def _pages_per_block(pages: _Pages) -> int:
    return max(1, min(_blocks().kv // pages.k.shape[2], pages.table.shape[1]))


def _attend_singles(
    q: Float[Array, "seqs heads head_dim"],
    pages: _Pages,
    kv_lens: Int32[Array, " seqs"],
    sinks: Float[Array, " heads"] | None,
    spec: AttentionSpec,
) -> Float[Array, "seqs heads head_dim"]:
    """One query a row, standing at the row's last place. A row with kv_len 0 gives zeros."""
    seqs, heads, head_dim = q.shape
    kv_heads, page_size = pages.k.shape[1:3]
    rows = min(_blocks().rows, seqs)
    pages_per_block = _pages_per_block(pages)
    block_kv = pages_per_block * page_size

    # long rows first, so that the rows of a group are of like length and padding costs nothing
    order = jnp.argsort(-kv_lens) if seqs > rows else jnp.arange(seqs, dtype=jnp.int32)

    def attend_group(group, out):
        # the last group reaches back, and computes some rows a second time
        members = lax.dynamic_slice_in_dim(order, jnp.minimum(group * rows, seqs - rows), rows)
        lens, query = kv_lens[members], q[members]
        query = query.reshape(rows, kv_heads, -1, head_dim)
        position = (lens - 1)[:, None]

        def visit(block, softmax):
            places = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
            visible = _visible(places[None, :], position, spec)
            k, v = _load(pages, members, block * pages_per_block, pages_per_block)
            return _add(softmax, query, k, v, visible[:, None, :], spec)

        first = jnp.int32(0)
        if spec.window is not None:
            begins = jnp.where(lens > 0, lens - spec.window, jnp.max(lens))
            first = jnp.maximum(jnp.min(begins), 0) // block_kv
        empty = _empty(rows, kv_heads, heads // kv_heads, head_dim)
        softmax = lax.fori_loop(first, _ceil_div(jnp.max(lens), block_kv), visit, empty)
        done = _finish(softmax, sinks, heads // kv_heads).reshape(rows, heads, head_dim)
        return out.at[members].set(done.astype(out.dtype), unique_indices=True)

    used_groups = _ceil_div(jnp.sum(kv_lens > 0, dtype=jnp.int32), rows)
    if seqs == rows:
        return attend_group(jnp.int32(0), jnp.zeros_like(q))
    return lax.fori_loop(0, used_groups, attend_group, jnp.zeros_like(q))


def _attend_runs(
    q: Float[Array, "tokens heads head_dim"],
    out: Float[Array, "tokens heads head_dim"],
    pages: _Pages,
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    sinks: Float[Array, " heads"] | None,
    spec: AttentionSpec,
) -> Float[Array, "tokens heads head_dim"]:
    """Fill in `out` for rows with more than one query."""
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = pages.k.shape[1:3]
    group = heads // kv_heads
    block_q = min(_blocks().q, tokens)
    pages_per_block = _pages_per_block(pages)
    block_kv = pages_per_block * page_size

    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    blocks_of_row = jnp.where(q_lens > 1, _ceil_div(q_lens, block_q), 0)
    blocks_before = jnp.cumulative_sum(blocks_of_row, include_initial=True)

    def attend_block(block, out):
        row = jnp.sum(blocks_before <= block, dtype=jnp.int32) - 1
        wanted = cu_q_lens[row] + (block - blocks_before[row]) * block_q
        start = jnp.minimum(wanted, tokens - block_q)  # a slice must lie inside
        token = start + jnp.arange(block_q, dtype=jnp.int32)
        mine = (token >= wanted) & (token < cu_q_lens[row + 1])
        position = jnp.where(mine, kv_lens[row] - (cu_q_lens[row + 1] - token), -1)
        query = lax.dynamic_slice_in_dim(q, start, block_q).reshape(
            block_q, kv_heads, group, head_dim
        )
        query = query.transpose(1, 2, 0, 3).reshape(1, kv_heads, group * block_q, head_dim)

        def visit(kv_block, softmax):
            places = kv_block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
            visible = _visible(places[None, :], position[:, None], spec)
            k, v = _load(pages, row[None], kv_block * pages_per_block, pages_per_block)
            return _add(softmax, query, k, v, jnp.tile(visible, (group, 1))[None], spec)

        first = jnp.int32(0)
        if spec.window is not None:
            nearest = jnp.min(jnp.where(mine, position, jnp.max(position)))
            first = jnp.maximum(nearest + 1 - spec.window, 0) // block_kv
        last = _ceil_div(jnp.max(position) + 1, block_kv)
        empty = _empty(1, kv_heads, group * block_q, head_dim)
        softmax = lax.fori_loop(first, last, visit, empty)
        done = _finish(softmax, sinks, group).reshape(kv_heads, group, block_q, head_dim)
        done = done.transpose(2, 0, 1, 3).reshape(block_q, heads, head_dim).astype(out.dtype)
        old = lax.dynamic_slice_in_dim(out, start, block_q)
        done = jnp.where(mine[:, None, None], done, old)
        return lax.dynamic_update_slice_in_dim(out, done, start, axis=0)

    return lax.fori_loop(0, blocks_before[-1], attend_block, out)


def _visible(
    places: Int32[Array, "#queries kv"], position: Int32[Array, "queries 1"], spec: AttentionSpec
) -> Bool[Array, "queries kv"]:
    visible = places <= position
    if spec.window is not None:
        visible &= places > position - spec.window
    return visible


def _load(
    pages: _Pages, rows: Int32[Array, " rows"], first: Int32[Array, ""], count: int
) -> tuple[Float[Array, "rows kv_heads kv head_dim"], Float[Array, "rows kv_heads kv head_dim"]]:
    """`count` pages of each row's KV, from its page `first` on."""
    # past the table's end any page will do: its places are masked
    columns = jnp.minimum(first + jnp.arange(count, dtype=jnp.int32), pages.table.shape[1] - 1)
    num_pages, kv_heads, page_size, head_dim = pages.k.shape
    page_ids = jnp.clip(pages.table[rows[:, None], columns[None, :]], 0, num_pages - 1)
    # head by head, which spares the transpose that gathering whole pages would need
    ids = page_ids[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]

    def gather(pool):
        tile = pool.reshape(-1, page_size, head_dim).at[ids].get(mode="promise_in_bounds")
        return tile.reshape(rows.shape[0], kv_heads, count * page_size, head_dim)

    return gather(pages.k), gather(pages.v)


def _add(
    softmax: _Softmax,
    query: Float[Array, "rows kv_heads queries head_dim"],
    k: Float[Array, "rows kv_heads kv head_dim"],
    v: Float[Array, "rows kv_heads kv head_dim"],
    visible: Bool[Array, "rows #queries kv"],
    spec: AttentionSpec,
) -> _Softmax:
    """Take one more block of KV into a running softmax."""
    if jax.default_backend() == "cpu":  # where 16-bit products are slow
        query, k, v = (x.astype(jnp.float32) for x in (query, k, v))
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    logits = jnp.einsum("SKGH,SKLH->SKGL", query, k, **exact) * spec.scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    logits = jnp.where(visible[:, None], logits, MASKED)
    # a stale place may hold NaN, and 0 * NaN is NaN
    v = jnp.where(jnp.any(visible, axis=1)[:, None, :, None], v, jnp.zeros((), v.dtype))

    peak = jnp.maximum(softmax.peak, jnp.max(logits, axis=-1))
    shrink = jnp.exp(softmax.peak - peak)
    weights = jnp.where(visible[:, None], jnp.exp(logits - peak[..., None]), 0)
    mass = softmax.mass * shrink + jnp.sum(weights, axis=-1)
    added = jnp.einsum("SKGL,SKLH->SKGH", weights.astype(v.dtype), v, **exact)
    return _Softmax(peak, mass, softmax.total * shrink[..., None] + added)


def _empty(rows: int, kv_heads: int, queries: int, head_dim: int) -> _Softmax:
    shape = (rows, kv_heads, queries)
    return _Softmax(
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def _finish(
    softmax: _Softmax, sinks: Float[Array, " heads"] | None, group: int
) -> Float[Array, "rows kv_heads queries head_dim"]:
    """Divide by the sum of weights; a query that saw nothing gives zeros."""
    mass, total = softmax.mass, softmax.total
    if sinks is not None:
        kv_heads, queries = mass.shape[1:]
        sink = jnp.repeat(
            sinks.astype(jnp.float32).reshape(1, kv_heads, group), queries // group, axis=2
        )
        peak = jnp.maximum(softmax.peak, sink)
        shrink = jnp.exp(softmax.peak - peak)
        mass = mass * shrink + jnp.exp(sink - peak)
        total = total * shrink[..., None]
    return total / jnp.maximum(mass, 1e-30)[..., None]


def _ceil_div(a: Int32[Array, "..."], b: int) -> Int32[Array, "..."]:
    return (a + (b - 1)) // b
