"""Layers with a window give pages back while their sequences run, and answers stay the same."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.core.params import SamplingParams
from tests.engine.test_schedule_invariance import Tally, compare
from tests.support.engines import MAX_NUM_SEQS, PAGE_SIZE, TinyEngine, tiny_parts

WINDOW = 40
ONE_SIZE = BucketLadder([Bucket("mixed", "full", 32, 4)])  # so that little is compiled
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def parts_mistral(model_folder):
    """Model R with a window on both layers."""
    overrides = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    overrides["sliding_window"] = WINDOW
    return tiny_parts(model_folder / "R", hf_overrides=overrides)


GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 3,
    "sliding_window_pattern": 3,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 1,
}


@pytest.fixture(scope="module")
def parts_gemma(model_folder):
    """Random weights: two layers with a window to one without."""
    return tiny_parts(model_folder / "R", load_format="dummy", hf_overrides=GEMMA)


@pytest.fixture(params=[pytest.param("parts_mistral", marks=pytest.mark.slow), "parts_gemma"])
def parts(request):
    return request.getfixturevalue(request.param)


def keeping(parts):
    """An engine that gives no page back before its sequence ends."""
    engine = TinyEngine(parts, token_budget=32)
    engine.scheduler.local.first_needed = lambda num_tokens: 0
    return engine


def jobs(num_jobs, prompt_len, max_tokens):
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 255, prompt_len).tolist() for _ in range(num_jobs)]
    params = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2, **OPTIONS[i % 3])
        for i in range(num_jobs)
    ]
    return prompts, params


@pytest.mark.parametrize(
    ("mode", "num_host_pages"), [("recompute", 0), ("swap", 64)], ids=["recompute", "swap"]
)
def test_pages_behind_the_window_go_back_and_no_token_changes(parts, mode, num_host_pages):
    prompts, params = jobs(6, 50, 70)
    want = keeping(parts).generate(prompts[:3], params[:3])
    engine = TinyEngine(
        parts,
        num_pages=1 + 20,
        num_local_pages=1 + 10,
        token_budget=32,
        preemption_mode=mode,
        num_host_pages=num_host_pages,
    )
    local, held = engine.scheduler.local, []

    def watch(plan):
        for seq in engine.scheduler.running:
            is_decode = seq.num_computed_tokens > seq.num_prompt_tokens
            held.append((len(seq.page_ids) - seq.first_local_page, is_decode))

    got = engine.generate(prompts[:3] * 2, params[:3] * 2, on_plan=watch)
    tally = Tally()
    for one, alone in zip(got, want * 2, strict=True):
        compare(one, alone, tally)
    assert len(tally.close_calls) <= max(1, 0.005 * tally.steps)
    assert max(n for n, is_decode in held if is_decode) <= -(-WINDOW // PAGE_SIZE) + 2
    assert local.pool.num_held == 0
    assert engine.scheduler.num_preemptions
    assert (engine.scheduler.tier.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("length", [48, 95])
def test_a_warm_prefix_with_windows_gives_the_tokens_of_a_cold_one(parts, length):
    prompt = [(3 * i) % 250 for i in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    engine = TinyEngine(parts, token_budget=32)
    cold = engine.generate([prompt], [params])[0]
    longer = prompt + list(cold.outputs[0].token_ids)
    warm = engine.generate([longer], [params])[0]
    tally = Tally()
    compare(cold, keeping(parts).generate([prompt], [params])[0], tally)
    assert warm.num_cached_tokens == (len(longer) - 1) // PAGE_SIZE * PAGE_SIZE
    compare(warm, keeping(parts).generate([longer], [params])[0], tally)
    assert not tally.close_calls


def test_a_prefix_whose_window_was_evicted_is_computed_again(parts):
    prompt = [(3 * i) % 250 for i in range(96)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    engine = TinyEngine(parts, num_local_pages=1 + 7, token_budget=32)
    cold = engine.generate([prompt], [params])[0]
    engine.generate(*jobs(1, 100, 8))  # takes all local pages, and few of the others
    warm = engine.generate([prompt], [params])[0]
    assert warm.num_cached_tokens == 0
    tally = Tally()
    compare(warm, cold, tally)
    assert not tally.close_calls


def test_answers_to_one_prompt_copy_the_local_page_that_it_ends_in(parts):
    prompts, _ = jobs(1, 58, 1)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    params = SamplingParams(n=MAX_NUM_SEQS, **options)
    got = TinyEngine(parts, token_budget=32).generate(prompts, [params])[0]
    want = keeping(parts).generate(prompts, [params])[0]
    for one, other in zip(got.outputs, want.outputs, strict=True):
        assert one.token_ids == other.token_ids
    assert len({tuple(answer.token_ids) for answer in got.outputs}) == MAX_NUM_SEQS


@pytest.mark.slow  # few other models have both kinds of pages, and it compiles much
def test_stages_with_one_kind_of_page_each_give_the_tokens_of_one_device(parts_gemma, model_folder):
    """The first of two has the layers with a window, the second the one without."""
    settings = {"load_format": "dummy", "hf_overrides": GEMMA, "swap_space": 0.001}
    staged = tiny_parts(model_folder / "R", **settings, pipeline_parallel_size=2)
    tight = {"num_pages": 1 + 16, "num_local_pages": 1 + 10, "token_budget": 32}
    swaps = {"preemption_mode": "swap", "num_host_pages": 64, "ladder": ONE_SIZE}
    prompts, params = jobs(3, 50, 70)
    params = [replace(one, n=2) for one in params]  # whose last page is copied
    engine = TinyEngine(staged, **tight, **swaps)
    got = engine.generate(prompts, params)
    want = TinyEngine(parts_gemma, token_budget=32, ladder=ONE_SIZE).generate(prompts, params)
    tally = Tally()
    for one, alone in zip(got, want, strict=True):
        compare(one, alone, tally)
    assert len(tally.close_calls) <= 1
    assert engine.scheduler.tier.num_swaps > 0
