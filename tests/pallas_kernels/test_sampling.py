from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.sampling import filter_logits, rank_of, top_n_logprobs
from pallas_kernels.sampling.kernel import find_thresholds_kernel
from tests.support.cuda_target import KERNEL, lower_for_hopper, struct

SMALL, LARGE = 130, 128 * 66 + 7  # below and above what is looked through block by block
ROWS = 4
ROUNDING = 1e-5  # of a float32 sum of probabilities


@jax.jit
def filtered(logits, *filters):
    return filter_logits(logits, jnp.ones(len(logits)), *filters)


top_20 = jax.jit(top_n_logprobs)
ranked = jax.jit(rank_of)


def logits_of(kind, vocab, seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, vocab)) * 10.0 ** rng.uniform(-2, 1.5, (rows, 1))
    if kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "few distinct":
        x = rng.integers(-1, 2, (rows, vocab)).astype(float)
    elif kind == "banned":
        x[rng.random((rows, vocab)) < rng.uniform(0.1, 0.999, (rows, 1))] = -np.inf
        x[np.arange(rows), rng.integers(0, vocab, rows)] = 1.0
    elif kind == "infinite":
        x[rng.random((rows, vocab)) < 0.02] = np.inf
    elif kind == "huge":
        x = rng.standard_normal((rows, vocab)) * 1e37
    elif kind == "one far above":
        x[:, 5] += 1000
    return x.astype(np.float32)


KINDS = ["normal", "ties", "few distinct", "banned", "infinite", "huge", "one far above"]


def must_and_may_keep(logits, top_k, top_p, min_p):
    """By sorting, in float64: what every right answer keeps, and what none may keep more than.

    They differ only where a sum of probabilities is within rounding of top_p.
    """
    x = logits.astype(np.float64)
    best = x.max()
    mass = np.where(x == best, 1.0, np.exp(x - np.where(np.isfinite(best), best, 1e308)))
    kept = (x > -np.inf) & (mass.astype(np.float32) >= np.float32(min_p) * (1 - ROUNDING))
    surely = (x > -np.inf) & (mass.astype(np.float32) >= np.float32(min_p) * (1 + ROUNDING))
    kept, surely = (kept, surely | (x == best)) if min_p > 0 else (x > -np.inf, x > -np.inf)
    if 0 < top_k < kept.sum():
        at_least_kth = x >= np.sort(x[kept])[-top_k]
        kept, surely = kept & at_least_kth, surely & at_least_kth
    if top_p < 1:
        order = np.sort(np.unique(x[kept]))[::-1]
        sums = np.array([mass[kept & (x >= value)].sum() for value in order])
        may = order[np.argmax(sums >= sums[-1] * min(np.float64(top_p) * (1 + ROUNDING), 1.0))]
        must = order[np.argmax(sums >= sums[-1] * np.float64(top_p) * (1 - ROUNDING))]
        kept, surely = kept & (x >= may), surely & (x >= must)
    return surely, kept


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from([SMALL, LARGE]),
    seed=st.integers(0, 2**32 - 1),
    top_k=st.lists(
        st.sampled_from([0, 1, 2, 5, 50, 129, 130, 8000, 2**31 - 1]), min_size=4, max_size=4
    ),
    top_p=st.lists(st.sampled_from([1.0, 0.999999, 0.95, 0.5, 0.1, 1e-9]), min_size=4, max_size=4),
    min_p=st.lists(st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]), min_size=4, max_size=4),
)
def test_filter_keeps_what_sorting_would_keep(kind, vocab, seed, top_k, top_p, min_p):
    logits = logits_of(kind, vocab, seed)
    got = np.asarray(
        filtered(
            logits,
            jnp.asarray(top_k, jnp.int32),
            jnp.asarray(top_p, jnp.float32),
            jnp.asarray(min_p, jnp.float32),
        )
    )
    for row in range(ROWS):
        kept = got[row] > -np.inf
        np.testing.assert_array_equal(got[row][kept], logits[row][kept])
        must, may = must_and_may_keep(logits[row], top_k[row], top_p[row], min_p[row])
        assert not (must & ~kept).any()
        assert not (kept & ~may).any()


def one_row(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    out = filtered(
        jnp.asarray([logits], jnp.float32),
        jnp.asarray([top_k], jnp.int32),
        jnp.asarray([top_p], jnp.float32),
        jnp.asarray([min_p], jnp.float32),
    )
    return np.flatnonzero(np.asarray(out[0]) > -np.inf).tolist()


def test_top_k_keeps_all_that_equal_the_kth():
    assert one_row([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2, 3]


def test_top_p_keeps_the_token_that_reaches_it():
    probabilities = np.log([0.5, 0.3, 0.15, 0.05])
    assert one_row(probabilities, top_p=0.49) == [0]
    assert one_row(probabilities, top_p=0.6) == [0, 1]
    assert one_row(probabilities, top_p=0.9) == [0, 1, 2]


def test_top_p_keeps_all_that_equal_the_last():
    assert one_row(np.log([0.4, 0.2, 0.2, 0.2]), top_p=0.5) == [0, 1, 2, 3]


def test_top_p_is_a_share_of_what_top_k_and_min_p_left():
    probabilities = np.log([0.4, 0.3, 0.2, 0.1])
    assert one_row(probabilities, top_p=0.65) == [0, 1]
    assert one_row(probabilities, top_p=0.55, top_k=2) == [0]
    assert one_row(probabilities, top_p=0.55, min_p=0.7) == [0]


def test_top_p_is_a_share_of_all_that_equal_the_kth_however_many_they_are():
    logits = np.zeros(LARGE, np.float32)
    logits[::1000] = np.log(LARGE * 1.5 / 9)  # 9 tokens with 60 % of the mass
    assert len(one_row(logits, top_k=50, top_p=0.605)) == LARGE
    assert len(one_row(logits, top_k=50, top_p=0.59)) == 9


def test_top_k_counts_what_min_p_left():
    assert one_row(np.log([0.4, 0.3, 0.2, 0.1]), top_k=3, min_p=0.6) == [0, 1]


def test_banned_tokens_stay_banned_when_top_k_is_larger_than_what_is_left():
    logits = [-np.inf] * 200
    logits[3], logits[150] = 1.0, -5.0
    assert one_row(logits, top_k=50) == [3, 150]


def test_rows_do_not_depend_on_each_other():
    logits = logits_of("normal", LARGE, 3)
    top_k, top_p = np.array([0, 40, 0, 0], np.int32), np.array([0.9, 1, 1, 0.4], np.float32)
    min_p = np.array([0, 0, 0, 0.01], np.float32)
    together = np.asarray(filtered(logits, top_k, top_p, min_p))
    for row in range(ROWS):
        alone = filtered(*(x[row : row + 1] for x in (logits, top_k, top_p, min_p)))
        np.testing.assert_array_equal(alone[0], together[row])


def test_logits_that_are_not_numbers_do_not_hang_or_touch_other_rows():
    logits = logits_of("normal", LARGE, 4)
    want = np.asarray(filtered(logits, *filters(ROWS)))
    logits[1, 7], logits[2] = np.nan, np.nan
    got = np.asarray(filtered(logits, *filters(ROWS)))
    np.testing.assert_array_equal(got[[0, 3]], want[[0, 3]])


def filters(rows):
    return np.full(rows, 40, np.int32), np.full(rows, 0.9, np.float32), np.zeros(rows, np.float32)


@pytest.mark.parametrize("vocab", [128_256, 50_257, 8192])
def test_on_hopper_one_kernel_filters_and_the_host_decides_nothing(vocab):
    rows = [struct(2, dtype=dtype) for dtype in ("float32", "int32", "float32", "float32")]
    text = lower_for_hopper(filter_logits, struct(2, vocab, dtype="float32"), *rows)
    assert text.count(KERNEL) == 1
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("warpgroups", [2, 4, 8])
def test_the_search_lowers_for_cuda_with_other_tiles(warpgroups):
    tiles = tuning.SearchTiles(warpgroups, loads=2, held=32)
    rows = [struct(3, dtype=dtype) for dtype in ("float32", "int32", "float32", "float32")]
    kernel = partial(find_thresholds_kernel, tiles=tiles)
    assert KERNEL in lower_for_hopper(kernel, struct(3, 32_002, dtype="float32"), *rows)


@pytest.mark.parametrize(("vocab", "by_kernel"), [(8191, True), (50_257, False)])
def test_on_hopper_xla_filters_small_vocabularies_and_all_if_told_so(monkeypatch, vocab, by_kernel):
    monkeypatch.setattr(tuning, "SEARCHES_BY_KERNEL", by_kernel)
    rows = [struct(2, dtype=dtype) for dtype in ("float32", "int32", "float32", "float32")]
    text = lower_for_hopper(filter_logits, struct(2, vocab, dtype="float32"), *rows)
    assert KERNEL not in text


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_a_gpu_tries_more_at_once_and_finds_the_same(monkeypatch, vocab):
    logits = logits_of("ties", vocab, 5)
    args = (
        logits,
        np.array([0, 40, 0, 3], np.int32),
        np.array([0.9, 0.7, 1, 1], np.float32),
        np.array([0, 0, 0.1, 0], np.float32),
    )
    want = np.asarray(filtered(*args))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    got = np.asarray(jax.jit(lambda x, *args: filter_logits(x, jnp.ones(len(x)), *args))(*args))
    jax.clear_caches()
    np.testing.assert_array_equal(got, want)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from([SMALL, LARGE]),
    seed=st.integers(0, 2**32 - 1),
)
def test_best_tokens_are_those_of_a_stable_sort(kind, vocab, seed):
    logits = logits_of(kind, vocab, seed)
    ids, logprobs = top_20(logits)
    want = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, want)
    for place in (0, 19):
        np.testing.assert_array_equal(ranked(logits, ids[:, place]), np.full(ROWS, place + 1))
    if kind not in ("infinite", "huge"):
        x = logits.astype(np.float64)
        total = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
        expected = np.take_along_axis(x - x.max(1, keepdims=True) - total, want, axis=1)
        np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-4)


def test_zeros_of_both_signs_are_equal():
    logits = jnp.asarray([[-0.0, 0.0, -0.0, 1.0]], jnp.float32)
    ids, _ = top_n_logprobs(logits, 4)
    assert ids.tolist() == [[3, 0, 1, 2]]
    assert one_row([-0.0, 0.0, -0.0, 1.0, -1.0], top_k=2) == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [0, 6])
def test_refuses_more_best_tokens_than_there_are(n):
    with pytest.raises(KernelArgumentError) as error:
        top_n_logprobs(jnp.zeros((1, 5)), n)
    assert str(error.value) == f"top_n_logprobs: n is {n}, allowed: 1 to the vocabulary's 5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": jnp.zeros((2, 5), jnp.bfloat16)},
            "filter_logits: logits is bfloat16, allowed: float32; cast it before",
        ),
        (
            {"top_k": jnp.zeros(3, jnp.int32)},
            "filter_logits: top_k has shape (3,), expected [rows] with rows = 2",
        ),
        (
            {"top_k": jnp.zeros(2)},
            "filter_logits: top_k is float32, allowed: int32; cast it before",
        ),
    ],
)
def test_filter_refuses_arguments_with_one_clear_line(change, message):
    args = {
        "logits": jnp.zeros((2, 5)),
        "temperature": jnp.ones(2),
        "top_k": jnp.zeros(2, jnp.int32),
        "top_p": jnp.ones(2),
        "min_p": jnp.zeros(2),
    }
    with pytest.raises(KernelArgumentError) as error:
        filter_logits(**(args | change))
    assert str(error.value) == message
