"""The schedule never changes the answer, on a real model over pages full of NaN."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.core.params import SamplingParams
from tests.support.engines import MOST_PAGES, PAGE_SIZE, TinyEngine

LEAST_MARGIN = 1e-4  # of the two likeliest tokens' logprobs, below which rounding may decide
LOGPROB_TOLERANCE = 1e-4


@dataclass
class Tally:
    """How many steps were compared, and how many differed where rounding may decide."""

    steps: int = 0
    close_calls: list[float] = field(default_factory=list)


@st.composite
def jobs(draw):
    num_shared = draw(st.sampled_from([0, 5, 15, 16, 17, 33]))
    shared = [7 + i % 3 for i in range(num_shared)]
    tail = draw(st.lists(st.integers(0, 255), min_size=1, max_size=40))
    max_tokens = draw(st.integers(1, 24))
    options = draw(
        st.sampled_from(
            [
                {},
                {"temperature": 1.0, "seed": 7},
                {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 11},
                {"repetition_penalty": 1.3, "presence_penalty": 0.5},
                {"prompt_logprobs": 1},
            ]
        )
    )
    common = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    return shared + tail, SamplingParams(**common | options)


def compare(got, want, tally: Tally) -> None:
    """Token by token until the first close call, after which the contexts differ."""
    answer, alone = got.outputs[0], want.outputs[0]
    assert len(answer.token_ids) == len(alone.token_ids)
    for step, (token, wanted) in enumerate(zip(answer.token_ids, alone.token_ids, strict=True)):
        tally.steps += 1
        top = sorted((p.logprob for p in alone.logprobs[step].values()), reverse=True)
        if token != wanted:
            assert top[0] - top[1] <= LEAST_MARGIN, f"step {step}: {token}, alone {wanted}"
            tally.close_calls.append(top[0] - top[1])
            return
        difference = answer.logprobs[step][token].logprob - alone.logprobs[step][token].logprob
        assert abs(difference) < LOGPROB_TOLERANCE


SCHEDULES = {
    "work": st.lists(jobs(), min_size=2, max_size=6),
    "token_budget": st.sampled_from([4, 17, 32, 256]),
    "spare_pages": st.integers(0, 6),
    "max_in_flight": st.integers(1, 2),
    "num_scheduler_steps": st.sampled_from([1, 3]),
    "hash_bits": st.sampled_from([256, 4]),
    "admission": st.sampled_from(["evict", "foresee"]),
}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(**SCHEDULES)
def test_chunked_batched_preempted_or_alone_the_tokens_are_the_same(parts_r, **schedule):
    compare_schedules(parts_r, parts_r, **schedule)


def compare_schedules(
    parts, parts_alone, work, token_budget, spare_pages, max_in_flight, num_scheduler_steps,
    hash_bits, admission,
):  # fmt: skip
    """Everything at once over `parts`, then each alone over `parts_alone`."""
    prompts, params = [job[0] for job in work], [job[1] for job in work]
    longest = max(len(p) + q.max_tokens for p, q in zip(prompts, params, strict=True))
    num_pages = 1 + -(-longest // PAGE_SIZE) + spare_pages
    crowd = TinyEngine(
        parts,
        num_pages=min(num_pages, MOST_PAGES),
        token_budget=token_budget,
        max_in_flight=max_in_flight,
        num_scheduler_steps=num_scheduler_steps,
        hash_bits=hash_bits,
        admission=admission,
    )
    tally = Tally()
    together = crowd.generate(prompts, params)
    for prompt, one, got in zip(prompts, params, together, strict=True):
        compare(got, TinyEngine(parts_alone).generate([prompt], [one])[0], tally)
    assert len(tally.close_calls) <= max(1, 0.005 * tally.steps)


def storm_of(num_requests):
    """Prompts of 10 tokens, 40 to sample: greedy, seeded, with penalties, all with logprobs."""
    random = np.random.default_rng(3)
    options = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.3},
    ]
    prompts = [random.integers(0, 255, 10).tolist() for _ in range(num_requests)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, **options[i % 4])
        for i in range(num_requests)
    ]
    return prompts, params


def test_a_storm_of_preemptions_changes_nothing_by_recompute_or_by_swap(parts_r):
    prompts, params = storm_of(34)
    calm = TinyEngine(parts_r).generate(prompts, params)
    for mode, num_host_pages in (("recompute", 0), ("swap", 24)):
        small = TinyEngine(
            parts_r, num_pages=1 + 5, preemption_mode=mode, num_host_pages=num_host_pages
        )
        stormy = small.generate(prompts, params)
        assert small.scheduler.num_preemptions >= 50
        assert (small.scheduler.tier.num_swaps >= 50) == (mode == "swap")
        tally = Tally()
        for want, got in zip(calm, stormy, strict=True):
            assert len(got.outputs[0].token_ids) == 40
            compare(got, want, tally)
        assert len(tally.close_calls) <= max(1, 0.005 * tally.steps)


@pytest.mark.parametrize("hash_bits", [256, 4])
def test_a_prompt_gets_its_tokens_cold_warm_eight_at_once_evicted_and_swapped(parts_r, hash_bits):
    random = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    fields = {"preemption_mode": "swap", "num_host_pages": 64, "hash_bits": hash_bits}
    engine, tally = TinyEngine(parts_r, num_pages=1 + 9, **fields), Tally()

    def others(count):
        return [random.integers(0, 255, 40).tolist() for _ in range(count)]

    def run(prompts):
        return engine.generate(prompts, [params] * len(prompts))

    for length in (15, 16, 17, 31, 32, 33):
        prompt = random.integers(0, 255, length).tolist()
        (cold,) = run([prompt])
        assert cold.num_cached_tokens == 0
        found = [run([prompt])[0], *run([prompt] * 8)]
        if hash_bits == 256:
            cached = {output.num_cached_tokens for output in found}
            assert cached == {(length - 1) // PAGE_SIZE * PAGE_SIZE}
        run(others(4))
        (evicted,) = run([prompt])  # from host memory, where eviction took its pages
        if hash_bits == 256:
            assert {evicted.num_cached_tokens} == cached
        num_swaps = engine.scheduler.tier.num_swaps
        swapped = run([*others(2), prompt])[2]
        assert engine.scheduler.tier.num_swaps > num_swaps
        for output in (*found, evicted, swapped):
            compare(output, cold, tally)
    assert len(tally.close_calls) <= max(1, 0.005 * tally.steps)


def test_the_tokens_of_different_prompts_differ(parts_r):
    """Otherwise the comparisons above would prove nothing."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 255, 20).tolist() for _ in range(20)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = TinyEngine(parts_r).generate(prompts, [params] * 20)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) >= 19


def test_evicted_prefix_pages_come_back_from_host_memory_with_the_same_tokens(parts_r):
    random = np.random.default_rng(6)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, explain=True
    )
    engine = TinyEngine(parts_r, num_pages=1 + 9, num_host_pages=64)
    tally = Tally()

    def run(prompt):
        return engine.generate([prompt], [params])[0]

    for length in (32, 33, 47, 49, 65):
        prompt = random.integers(0, 255, length).tolist()
        cold, warm = run(prompt), run(prompt)
        for _ in range(4):
            run(random.integers(0, 255, 40).tolist())
        back, again = run(prompt), run(prompt)
        told = engine.llm.explanation(back.request_id)["answers"][0]
        whole = (length - 1) // PAGE_SIZE * PAGE_SIZE
        assert back.num_cached_tokens == warm.num_cached_tokens == whole
        assert told["host_cached_tokens"] == whole
        for got in (warm, back, again):
            compare(got, cold, tally)
    host = engine.scheduler.host_prefixes
    assert host.num_stored
    assert host.num_loaded
    assert len(tally.close_calls) <= max(1, 0.005 * tally.steps)
    engine.llm.reset_prefix_cache()
    assert host.num_pages == engine.scheduler.tier.num_used_pages == 0
