import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.kv_write import kv_write
from pallas_kernels.ragged_attention import (
    ragged_paged_attention,
    ragged_paged_attention_reference,
)
from pallas_kernels.spec import AttentionSpec
from tests.support.cases import ragged_case

SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=7),
    "soft_cap": AttentionSpec(0.3, soft_cap=2.0),
    "window_and_cap": AttentionSpec(0.3, window=20, soft_cap=2.0),
}
CHOICES = {
    "plain": (SPECS["plain"], False),
    "sinks": (SPECS["plain"], True),
    "window": (SPECS["window"], False),
    "soft_cap": (SPECS["soft_cap"], False),
    "all": (SPECS["window_and_cap"], True),
}
SMALL = {"heads": 6, "kv_heads": 2, "head_dim": 8, "page_size": 4}
PADDED = {"padding_rows": 2, "padding_tokens": 5}


def run(case, spec, *, decode_only=False):
    op = functools.partial(ragged_paged_attention, spec=spec, decode_only=decode_only)
    return np.asarray(jax.jit(op)(**case), np.float32)


def reference(case, spec):
    op = functools.partial(ragged_paged_attention_reference, spec=spec)
    return np.asarray(jax.jit(op)(**case), np.float32)


def dense_attention(case, spec):
    """Row by row and head by head in float64 NumPy, from the tokens laid out without pages."""
    c = {name: None if x is None else np.asarray(x, np.float64) for name, x in case.items()}
    table, kv_lens = np.asarray(case["page_table"]), np.asarray(case["kv_lens"])
    cu_q_lens = np.asarray(case["cu_q_lens"])
    heads, kv_heads, page_size = c["q"].shape[1], c["k_pages"].shape[1], c["k_pages"].shape[2]
    out = np.zeros_like(c["q"])
    for row, kv_len in enumerate(kv_lens):
        begin, end = cu_q_lens[row], cu_q_lens[row + 1]
        for token in range(begin, end):
            position = kv_len - end + token
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            places = range(first, position + 1)
            where = [(table[row, place // page_size], place % page_size) for place in places]
            for head in range(heads):
                kv_head = head * kv_heads // heads
                k = np.array([c["k_pages"][page, kv_head, offset] for page, offset in where])
                v = np.array([c["v_pages"][page, kv_head, offset] for page, offset in where])
                logits = k @ c["q"][token, head] * spec.scale
                if spec.soft_cap is not None:
                    logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
                sink = 0.0 if c["sinks"] is None else np.exp(c["sinks"][head])
                out[token, head] = np.exp(logits) @ v / (np.exp(logits).sum() + sink)
    return out


@pytest.mark.parametrize(("spec", "with_sinks"), CHOICES.values(), ids=CHOICES)
def test_reference_agrees_with_dense_attention_without_pages(spec, with_sinks):
    case = ragged_case(
        [1, 5, 0, 9], [13, 5, 0, 26], **SMALL, **PADDED, with_sinks=with_sinks, window=spec.window
    )
    np.testing.assert_allclose(reference(case, spec), dense_attention(case, spec), atol=2e-6)


@pytest.mark.parametrize(("spec", "with_sinks"), CHOICES.values(), ids=CHOICES)
def test_mixed_batch_agrees_with_reference(spec, with_sinks):
    check_mixed_batch(6, 2, spec, with_sinks)


@pytest.mark.parametrize("heads_and_kv_heads", [(4, 1), (3, 3)], ids=["mqa", "mha"])
def test_one_kv_head_for_all_or_one_for_each_agrees_with_reference(heads_and_kv_heads):
    check_mixed_batch(*heads_and_kv_heads, SPECS["window"], True)


def check_mixed_batch(heads, kv_heads, spec, with_sinks):
    case = ragged_case(
        [1, 5, 1, 40, 0, 2],
        [30, 5, 1, 177, 0, 33],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        page_size=4,
        **PADDED,
        with_sinks=with_sinks,
        window=spec.window,
    )
    np.testing.assert_allclose(run(case, spec), reference(case, spec), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("spec", "with_sinks"), CHOICES.values(), ids=CHOICES)
def test_decode_batch_agrees_with_reference(spec, with_sinks):
    lens = [30, 5, 1, 277, 16, 2, 9, 44, 128, 129, 100]
    case = ragged_case(
        [1] * len(lens),
        lens,
        **SMALL,
        padding_rows=2,
        padding_tokens=2,
        with_sinks=with_sinks,
        window=spec.window,
    )
    got = run(case, spec, decode_only=True)
    np.testing.assert_allclose(got, reference(case, spec), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kv_lens", [[0, 3], [3, 0, 300], [0, 0]])
def test_decode_rows_without_kv_give_zeros_wherever_they_stand(kv_lens):
    case = ragged_case([1] * len(kv_lens), kv_lens, **SMALL)
    got = run(case, SPECS["plain"], decode_only=True)
    np.testing.assert_allclose(got, reference(case, SPECS["plain"]), rtol=2e-5, atol=2e-6)
    assert not got[np.asarray(kv_lens) == 0].any()


@pytest.mark.parametrize(
    ("dtype", "decode_only"), [(jnp.bfloat16, False), (jnp.bfloat16, True), (jnp.float16, False)]
)
def test_16_bit_types_agree_with_reference_to_their_precision(dtype, decode_only):
    q_lens = [1, 1, 1] if decode_only else [1, 6, 3]
    case = ragged_case(q_lens, [30, 6, 140], **SMALL, dtype=dtype)
    got = run(case, SPECS["plain"], decode_only=decode_only)
    np.testing.assert_allclose(got, reference(case, SPECS["plain"]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("page_size", [1, 256])
def test_any_page_size_works(page_size):
    case = ragged_case(
        [40, 1, 3], [300, 200, 3], heads=2, kv_heads=1, head_dim=4, page_size=page_size
    )
    np.testing.assert_allclose(
        run(case, SPECS["plain"]), reference(case, SPECS["plain"]), rtol=2e-5, atol=2e-6
    )


def test_large_logits_do_not_overflow():
    case = ragged_case([3, 1], [20, 9], **SMALL)
    spec = AttentionSpec(300.0)
    np.testing.assert_allclose(run(case, spec), reference(case, spec), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decode_only", [False, True])
def test_page_ids_past_a_row_may_be_anything(decode_only):
    q_lens = [1, 1] if decode_only else [2, 1]
    case = ragged_case(q_lens, [9, 30], **SMALL)
    want = run(case, SPECS["plain"], decode_only=decode_only)
    table = np.array(case["page_table"])
    table[0, 3:], table[1, 8:] = 10**6, -7
    case["page_table"] = jnp.asarray(table)
    np.testing.assert_array_equal(run(case, SPECS["plain"], decode_only=decode_only), want)


@pytest.mark.parametrize("decode_only", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(decode_only):
    q_len = 1 if decode_only else 6
    lens = [33, 140, 7, 90, 12]
    case = ragged_case([q_len] * 5, lens, **SMALL)
    together = run(case, SPECS["plain"], decode_only=decode_only)
    for row, kv_len in list(enumerate(lens))[1:3]:
        alone = case | {
            "q": case["q"][row * q_len : (row + 1) * q_len],
            "page_table": case["page_table"][row : row + 1],
            "kv_lens": jnp.asarray([kv_len], jnp.int32),
            "cu_q_lens": jnp.asarray([0, q_len], jnp.int32),
        }
        np.testing.assert_allclose(
            run(alone, SPECS["plain"], decode_only=decode_only),
            together[row * q_len : (row + 1) * q_len],
            rtol=2e-6,
            atol=2e-6,
        )


@pytest.mark.parametrize("decode_only", [False, True])
def test_a_wide_page_table_costs_no_memory(decode_only):
    def temp_bytes(pages_per_seq):
        case = ragged_case(
            [1] * 3 if decode_only else [2] * 3, [40] * 3, **SMALL, pages_per_seq=pages_per_seq
        )
        op = functools.partial(ragged_paged_attention, spec=SPECS["plain"], decode_only=decode_only)
        compiled = jax.jit(op).lower(**case).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(5000) < temp_bytes(50) + 5000


def test_attends_inside_jit_to_pages_that_the_same_program_wrote_and_donated():
    case = ragged_case([4, 1], [11, 6], **SMALL, poison=0.0)
    slots = []
    for row, kv_len in enumerate([11, 6]):
        new = range(kv_len - [4, 1][row], kv_len)
        slots += [int(case["page_table"][row, p // 4]) * 4 + p % 4 for p in new]
    k, v = jax.random.normal(jax.random.key(1), (2, 5, 2, 8))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_pages, v_pages, case, k, v, slots):
        @jax.jit
        def layer(k_pages, v_pages):
            k_pages, v_pages = kv_write(k_pages, v_pages, k, v, slots)
            out = ragged_paged_attention(
                **case, k_pages=k_pages, v_pages=v_pages, spec=SPECS["plain"]
            )
            return out, k_pages, v_pages

        return layer(k_pages, v_pages)

    rest = {name: x for name, x in case.items() if not name.endswith("pages")}
    args = (jnp.copy(case["k_pages"]), jnp.copy(case["v_pages"]))
    out, k_pages, v_pages = step(*args, rest, k, v, jnp.asarray(slots, jnp.int32))
    assert args[0].is_deleted()
    want = reference(rest | {"k_pages": k_pages, "v_pages": v_pages}, SPECS["plain"])
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-6)
    assert np.abs(want - reference(case, SPECS["plain"])).max() > 0.1


def test_a_gpu_without_a_kernel_runs_in_xla_and_says_so_once(monkeypatch, caplog):
    case = ragged_case([1, 40, 1], [30, 140, 70], **SMALL, **PADDED)
    want = reference(case, SPECS["window"])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = run(case, SPECS["window"])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert [record.message for record in caplog.records] == [
        "ragged_paged_attention runs in plain XLA, several times slower than the kernel: "
        "no kernel for 6/2 heads of 8, pages of 4, float32 on this GPU"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": jnp.zeros((3, 5, 8))},
            "ragged_paged_attention: q has 5 heads and the pages 2 KV heads: heads must be a "
            "multiple of kv_heads",
        ),
        (
            {"q": jnp.zeros((3, 6, 4))},
            "ragged_paged_attention: k_pages has shape (14, 2, 4, 8), expected "
            "[pages kv_heads page_size head_dim] with head_dim = 4",
        ),
        (
            {"q": jnp.zeros((3, 6, 8), jnp.int8)},
            "ragged_paged_attention: q is int8, allowed: float32, bfloat16, float16; "
            "cast it before",
        ),
        (
            {"q": jnp.zeros((3, 6, 8), jnp.bfloat16)},
            "ragged_paged_attention: k_pages is float32, allowed: bfloat16; cast it before",
        ),
        (
            {"cu_q_lens": jnp.zeros(2, jnp.int32)},
            "ragged_paged_attention: cu_q_lens has shape (2,), expected [seqs+1] with seqs = 2",
        ),
        (
            {"sinks": jnp.zeros(5)},
            "ragged_paged_attention: sinks has shape (5,), expected [heads] with heads = 6",
        ),
        (
            {"kv_lens": jnp.zeros(2)},
            "ragged_paged_attention: kv_lens is float32, allowed: int32; cast it before",
        ),
        (
            {"decode_only": True},
            "ragged_paged_attention: decode_only with 3 tokens and 2 rows: give one token a row, "
            "or leave decode_only out",
        ),
        (
            {"spec": AttentionSpec(1.0, window=0)},
            "ragged_paged_attention: window is 0, allowed: 1 and over, or None for no window",
        ),
        (
            {"spec": AttentionSpec(1.0, soft_cap=0.0)},
            "ragged_paged_attention: soft_cap is 0.0, allowed: over 0, or None for no cap",
        ),
    ],
)
def test_refuses_arguments_with_one_clear_line(change, message):
    case = ragged_case([2, 1], [9, 25], **SMALL) | {"spec": SPECS["plain"]}
    with pytest.raises(KernelArgumentError) as error:
        ragged_paged_attention(**(case | change))
    assert str(error.value) == message
