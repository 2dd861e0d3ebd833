"""Ragged batches for tests of the ops, with NaN wherever nobody may look."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def ragged_case(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: DTypeLike = jnp.float32,
    poison: float = np.nan,
    seed: int = 0,
    pages_per_seq: int | None = None,
    padding_rows: int = 0,
    padding_tokens: int = 0,
    spare_pages: int = 3,
    window: int | None = None,
    with_sinks: bool = False,
) -> dict[str, Any]:
    """Arguments of `ragged_paged_attention`, but for `spec`, as a dict.

    Row `s` has `q_lens[s]` queries at the end of `kv_lens[s]` tokens, on pages in random order.
    `poison` fills page 0, spare pages, places past a row's end, queries of padding and, with
    `window`, pages that no query of the row sees; unused entries of the page table name poisoned
    pages.
    """
    rng = np.random.default_rng(seed)
    seqs, tokens = len(q_lens) + padding_rows, sum(q_lens) + padding_tokens
    pages_of_row = [-(-kv_len // page_size) for kv_len in kv_lens]
    width = pages_per_seq or max([*pages_of_row, 1]) + 1
    num_pages = 1 + sum(pages_of_row) + spare_pages
    shape = (num_pages, kv_heads, page_size, head_dim)
    k_pages, v_pages = (np.full(shape, poison, np.float32) for _ in range(2))
    page_ids = rng.permutation(np.arange(1, num_pages, dtype=np.int32))
    used, unused = page_ids[: sum(pages_of_row)], page_ids[sum(pages_of_row) :]
    page_table = rng.choice(np.append(unused, 0), (seqs, width)).astype(np.int32)

    first = 0
    for row, (q_len, kv_len, count) in enumerate(zip(q_lens, kv_lens, pages_of_row, strict=True)):
        mine = used[first : first + count]
        first += count
        page_table[row, :count] = mine
        begin = 0 if window is None else max(kv_len - q_len - window + 1, 0)
        for place in range(begin - begin % page_size, kv_len):
            page, offset = mine[place // page_size], place % page_size
            k_pages[page, :, offset] = rng.standard_normal((kv_heads, head_dim))
            v_pages[page, :, offset] = rng.standard_normal((kv_heads, head_dim))

    q = np.full((tokens, heads, head_dim), poison, np.float32)
    q[: sum(q_lens)] = rng.standard_normal((sum(q_lens), heads, head_dim))
    padded_q_lens = [*q_lens, *[0] * padding_rows]
    return {
        "q": jnp.asarray(q, dtype),
        "k_pages": jnp.asarray(k_pages, dtype),
        "v_pages": jnp.asarray(v_pages, dtype),
        "page_table": jnp.asarray(page_table),
        "kv_lens": jnp.asarray([*kv_lens, *[0] * padding_rows], jnp.int32),
        "cu_q_lens": jnp.asarray(np.cumsum([0, *padded_q_lens]), jnp.int32),
        "sinks": jnp.asarray(rng.standard_normal(heads), jnp.float32) if with_sinks else None,
    }
