"""Attention of a ragged batch to paged KV: the op, its contract, and the choice of what runs."""

import functools
import logging

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.ragged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.ragged_attention.xla import ragged_paged_attention_xla
from pallas_kernels.spec import AttentionSpec

__all__ = ["ragged_paged_attention", "ragged_paged_attention_reference"]

_log = logging.getLogger(__name__)
_OP = "ragged_paged_attention"


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    cu_q_lens: Int32[Array, " seqs+1"],
    sinks: Float[Array, " heads"] | None,
    *,
    spec: AttentionSpec,
    decode_only: bool = False,
) -> Float[Array, "tokens heads head_dim"]:
    """Attend from each row's new tokens to the KV of that row, read through its page table.

    Row `s` owns the tokens `cu_q_lens[s] : cu_q_lens[s + 1]`, which are the last of its
    `kv_lens[s]` tokens and whose KV is in the pages already: of `q_len` queries, query `i` stands
    at position `kv_lens[s] - q_len + i` and sees the positions up to its own. Query head `n` uses
    KV head `n // (heads // kv_heads)`. Entries of the page table past a row's last page, pages
    before a window, and places past `kv_lens[s]` may hold anything, NaN included.

    Args:
        q: rotated, not scaled; rows end to end, padding after the last.
        k_pages, v_pages: float32, bfloat16 or float16, of q's type. Never copied as a whole.
        page_table: page ids in the order of the row's tokens.
        kv_lens: in tokens, those of this step included. 0 makes a row of padding.
        cu_q_lens: running total of query lengths, from 0. A row of padding has length 0.
        sinks: for each head one more logit, already scaled, that takes its share in the softmax's
            denominator and adds nothing; None for none.
        spec: scale, window in tokens, soft cap. Static: a new one compiles.
        decode_only: a static promise that `tokens == seqs` and that row `s` owns token `s` alone,
            or nothing if its `kv_len` is 0; `cu_q_lens` is then not read.

    Returns:
        In q's type. Tokens of padding, and queries that see nothing, give zeros.

    Raises:
        KernelArgumentError: shapes that do not fit together, another type, heads that are no
            multiple of kv_heads, a spec out of range. While tracing, so never in a running step.

    Cost follows the KV in use and not the width of the page table. Logits, softmax and sums are
    float32; a 16-bit V is multiplied with weights of its own type, except on a CPU.

    Sources: paging after Kwon et al. 2023 (arXiv:2309.06180); running softmax after Milakov and
    Gimelshein 2018 (arXiv:1805.02867) and Dao et al. 2022 (arXiv:2205.14135); sinks after Xiao et
    al. 2023 (arXiv:2309.17453) in gpt-oss's form.
    """
    _check(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, sinks, spec, decode_only)
    arguments = (q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, sinks)
    if jax.default_backend() != "gpu":
        return ragged_paged_attention_xla(*arguments, spec=spec, decode_only=decode_only)

    # the kernels need Mosaic GPU, which not every jaxlib carries
    from pallas_kernels import tuning

    if tuning.hopper_available() and tuning.supports(
        heads=q.shape[1],
        kv_heads=k_pages.shape[1],
        head_dim=q.shape[2],
        page_size=k_pages.shape[2],
        dtype=q.dtype,
        spec=spec,
    ):
        return _run_kernel(*arguments, spec=spec, decode_only=decode_only)
    _tell_fallback(q.shape[1], k_pages.shape[1], q.shape[2], k_pages.shape[2], q.dtype.name)
    return ragged_paged_attention_xla(*arguments, spec=spec, decode_only=decode_only)


def _run_kernel(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, sinks, *, spec, decode_only):
    if decode_only:
        from pallas_kernels.ragged_attention.decode_kernel import decode_attention

        return decode_attention(q, k_pages, v_pages, page_table, kv_lens, sinks, spec=spec)
    from pallas_kernels.ragged_attention.prefill_kernel import mixed_attention

    return mixed_attention(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, sinks, spec=spec)


@functools.cache
def _tell_fallback(heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: str) -> None:
    _log.warning(
        "ragged_paged_attention runs in plain XLA, several times slower than the kernel: no kernel "
        "for %d/%d heads of %d, pages of %d, %s on this GPU",
        heads,
        kv_heads,
        head_dim,
        page_size,
        dtype,
    )


def _check(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, sinks, spec, decode_only) -> None:
    pages = ("pages", "kv_heads", "page_size", "head_dim")
    expected = {
        "q": (q, ("tokens", "heads", "head_dim")),
        "k_pages": (k_pages, pages),
        "v_pages": (v_pages, pages),
        "page_table": (page_table, ("seqs", "pages_per_seq")),
        "kv_lens": (kv_lens, ("seqs",)),
        "cu_q_lens": (cu_q_lens, ("seqs+1",)),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, ("heads",))
    sizes = checks.check_shapes(_OP, expected)
    checks.check_dtype(_OP, "q", q, checks.KV_TYPES)
    for name, array in (("k_pages", k_pages), ("v_pages", v_pages)):
        checks.check_dtype(_OP, name, array, (q.dtype,))
    for name, array in (("page_table", page_table), ("kv_lens", kv_lens), ("cu_q_lens", cu_q_lens)):
        checks.check_dtype(_OP, name, array, ("int32",))
    checks.check_head_groups(_OP, sizes["heads"], sizes["kv_heads"])
    checks.check_attention_spec(_OP, spec)
    if decode_only and sizes["tokens"] != sizes["seqs"]:
        raise KernelArgumentError(
            f"{_OP}: decode_only with {sizes['tokens']} tokens and {sizes['seqs']} rows: "
            "give one token a row, or leave decode_only out"
        )
