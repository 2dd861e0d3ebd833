"""Random workloads: whatever the schedule, a sequence gets the tokens that it would get alone."""

from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.core import foresight
from jaxpaged.core.local_pages import most_of_decode
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.sequence import SeqState
from tests.core.fake_device import (
    VOCAB,
    Loop,
    generate_alone,
    make_scheduler,
    make_sequence,
    outcome,
)

MAX_LEN = 48
PAGE_SIZE = 4
PAGES_OF_LONGEST = MAX_LEN // PAGE_SIZE


@pytest.fixture(autouse=True, scope="module")
def few_answers_foretell():
    """Workloads are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foresight, "FEWEST", 2)
        yield


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    options: dict
    salt: str
    arrives_after: int  # steps
    aborted_after: int | None  # steps
    key_name: str = ""
    priority: int = 0


@st.composite
def jobs(draw):
    shared = (7,) * draw(st.integers(0, 14))  # equal beginnings, of many lengths
    prompt = shared + tuple(draw(st.lists(st.integers(6, 9), min_size=1, max_size=16)))
    max_tokens = draw(st.integers(0, MAX_LEN - len(prompt)))
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
                "min_tokens": st.integers(0, max_tokens),
                "presence_penalty": st.sampled_from([0.0, 0.5]),
                "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.just(0.5), max_size=2),
                "allowed_token_ids": st.just(list(range(20))),
                "prompt_logprobs": st.just(1),
                "skip_reading_prefix_cache": st.booleans(),
                "temperature": st.sampled_from([0.0, 1.0]),
                "n": st.integers(2, 4),
                "output_kind": st.just(OutputKind.FINAL_ONLY),
            },
        )
    )
    return Job(
        prompt,
        max_tokens,
        options,
        draw(st.sampled_from(["", "", "other"])),
        draw(st.integers(0, 12)),
        draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
        draw(st.sampled_from(["a", "b"])),
        draw(st.integers(-1, 1)),
    )


@st.composite
def limits(draw):
    window = draw(st.sampled_from([0, 0, 0, 1, 4, 6, 13]))
    fewest_local = 2 + most_of_decode(window, PAGE_SIZE)
    return {
        "window": window,
        "num_local_pages": draw(st.integers(fewest_local, 3 * fewest_local)),
        "has_both": draw(st.booleans()) if window else False,
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 24)),
        "max_model_len": MAX_LEN,
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "max_num_scored_tokens": draw(st.sampled_from([2, 8, 256])),
        "reserve_full_prompt": draw(st.booleans()),
        "admission": draw(st.sampled_from(["foresee", "foresee", "evict", "no-evict"])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority", "fair", "sjf"])),
        "num_pages": draw(st.integers(PAGES_OF_LONGEST + 1, 3 * PAGES_OF_LONGEST)),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap", "auto"])),
        "num_host_pages": draw(st.sampled_from([0, 8, 24, 64])),
        "hash_bits": draw(st.sampled_from([256, 4])),
        "step_sizes": draw(st.sampled_from([(), (2, 8, 24), (3, 5, 6, 11, 40)])),
    }


def sequences_of(jobs, banned_runs=()):
    """Each job's sequences, n of them; those of every second job must not say `banned_runs`."""
    seqs = []
    for number, job in enumerate(jobs):
        runs = banned_runs if number % 2 else ()
        options = {"max_tokens": job.max_tokens, "temperature": 0.0} | job.options
        params = SamplingParams(**options, bad_words=["said differently"] * bool(runs))
        fields = {
            "request_id": str(number),
            "cache_salt": job.salt,
            "key_name": job.key_name,
            "priority": job.priority,
            "banned_runs": runs,
        }
        seqs.append(
            [
                make_sequence(
                    10 * number + choice,
                    job.prompt,
                    job.max_tokens,
                    params=params,
                    choice=choice,
                    **fields,
                )
                for choice in range(params.n)
            ]
        )
    return seqs


def run_jobs(jobs, seqs, limits, max_in_flight):
    limits = dict(limits)
    has_both = limits.pop("has_both", False)
    loop = Loop(make_scheduler(page_size=PAGE_SIZE, **limits), max_in_flight, has_both)
    for step in range(3000):
        for job, answers in zip(jobs, seqs, strict=True):
            if job.arrives_after == step:
                for seq in answers:
                    loop.scheduler.add(seq)
            if job.aborted_after is not None and job.arrives_after + job.aborted_after == step:
                for seq in answers[job.aborted_after % 2 :: 2] or answers:
                    loop.scheduler.abort(seq)
        loop.step()
        if all(seq.state is SeqState.FINISHED for seq in chain(*seqs)) and not loop.in_flight:
            return loop
    raise AssertionError("a sequence never finished")


def check_workload(jobs, limits, max_in_flight, banned_runs):
    seqs = sequences_of(jobs, banned_runs)
    loop = run_jobs(jobs, seqs, limits, max_in_flight)
    seqs = list(chain(*seqs))
    for seq in seqs:
        window = limits["window"] if not limits["has_both"] else 0
        tokens, reason, stop_reason = generate_alone(seq.request, MAX_LEN, window=window)
        if seq.finish_reason == "abort":
            assert seq.output_token_ids == tokens[: len(seq.output_token_ids)]
        else:
            assert outcome(seq) == (tokens, reason, stop_reason)
    assert loop.scheduler.pool.num_held == 0
    assert loop.scheduler.local is None or loop.scheduler.local.pool.num_held == 0
    assert loop.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs)


# after any token one of these bans something, so that they change most answers
RUNS = (*((a, b) for a in range(VOCAB) for b in (0, 9, 17)), (1, 2, 3))

workload = given(
    jobs=st.lists(jobs(), min_size=1, max_size=8),
    limits=limits(),
    max_in_flight=st.sampled_from([1, 2, 2]),
    banned_runs=st.sampled_from([(), RUNS]),
)
calm = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(calm, max_examples=60)
@workload
def test_the_schedule_never_changes_the_answer(jobs, limits, max_in_flight, banned_runs):
    check_workload(jobs, limits, max_in_flight, banned_runs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(calm, max_examples=1000)
@workload
def test_the_schedule_never_changes_the_answer_in_many_workloads(
    jobs, limits, max_in_flight, banned_runs
):
    check_workload(jobs, limits, max_in_flight, banned_runs)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "sjf"])
def test_answers_for_which_there_are_too_few_pages_are_not_computed_again_for_each_token(policy):
    """In steps in which one waits for its token to be read, another one begins and takes pages."""
    jobs = [Job((7,) * 9 + (6,), 38, {"ignore_eos": True, "n": 3}, "", 0, None)]
    limits = {
        "window": 6,
        "num_local_pages": 6,
        "has_both": True,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 1,
        "max_model_len": MAX_LEN,
        "reserve_full_prompt": False,
        "num_pages": 32,
        "scheduling_policy": policy,
    }
    _, seqs = sequences_of(jobs * 2, RUNS)
    loop = run_jobs(jobs, [seqs], limits, 2)
    assert loop.num_steps < 300  # 3 x 47 tokens, one a step


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "sjf"])
@pytest.mark.parametrize(
    ("mode", "num_host_pages"), [("recompute", 0), ("swap", 200), ("swap", 20)]
)
def test_a_preemption_storm_ends_with_the_right_tokens(policy, mode, num_host_pages):
    endless = {"ignore_eos": True}
    jobs = [
        Job((7,) * (i % 9) + (6, i % 4), 30, endless, "", i % 3, None, "abc"[i % 3], i % 2)
        for i in range(32)
    ]
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": MAX_LEN,
        "enable_prefix_caching": True,
        "reserve_full_prompt": False,
        "num_pages": PAGES_OF_LONGEST * 5 // 4,
        "scheduling_policy": policy,
        "preemption_mode": mode,
        "num_host_pages": num_host_pages,
    }
    seqs = sequences_of(jobs)
    loop = run_jobs(jobs, seqs, limits, 2)
    assert loop.scheduler.num_preemptions >= 50
    num_swaps = loop.scheduler.tier.num_swaps
    assert (num_swaps >= 50) == (mode == "swap")
    assert not [key for key in loop.device.host if key >= 0]  # those below are prefix pages
    for (seq,) in seqs:
        assert outcome(seq) == generate_alone(seq.request, MAX_LEN)
