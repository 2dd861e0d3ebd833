"""What the scheduler shares through the prefix cache, and when pages get there."""

import pytest

from jaxpaged.core.params import SamplingParams
from tests.core.fake_device import (
    Loop,
    add,
    commit,
    make_scheduler,
    make_sequence,
    prompt,
    shares,
)


def finished(scheduler, seq):
    add(scheduler, seq)
    Loop(scheduler).run()
    return seq


def test_a_prompt_seen_before_is_computed_from_where_it_differs():
    scheduler = make_scheduler()
    finished(scheduler, make_sequence(0, prompt(0, 12)))
    (seq,) = add(scheduler, make_sequence(1, [*range(8), 30, 31, 32, 33, 34]))
    assert shares(scheduler.schedule()) == [(1, 8, 5)]
    assert seq.num_cached_tokens == 8


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 7, 8, 9])
def test_the_same_prompt_again_leaves_a_token_to_compute(prompt_len):
    scheduler = make_scheduler()
    finished(scheduler, make_sequence(0, prompt(0, prompt_len)))
    (seq,) = add(scheduler, make_sequence(1, prompt(0, prompt_len)))
    plan = scheduler.schedule()
    assert seq.num_cached_tokens == (prompt_len - 1) // 4 * 4
    assert shares(plan) == [(1, seq.num_cached_tokens, prompt_len - seq.num_cached_tokens)]


@pytest.mark.parametrize("options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_who_must_see_the_whole_prompt_reads_nothing_from_the_cache(options):
    scheduler = make_scheduler()
    finished(scheduler, make_sequence(0, prompt(0, 12)))
    params = SamplingParams(max_tokens=4, **options)
    add(scheduler, make_sequence(1, prompt(0, 12), params=params))
    assert shares(scheduler.schedule()) == [(1, 0, 12)]


def test_pages_of_a_planned_step_are_found_in_the_same_plan():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0, prompt(0, 8)), make_sequence(1, prompt(0, 9)))
    assert shares(scheduler.schedule()) == [(0, 0, 8), (1, 8, 1)]


def test_pages_that_a_step_in_flight_samples_into_are_not_found():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0, prompt(0, 3)))
    first = scheduler.schedule()
    second = scheduler.schedule()
    commit(scheduler, first, 30)
    assert len(scheduler.cache) == 0
    commit(scheduler, second, 31)
    add(scheduler, make_sequence(1, [0, 1, 2, 30, 31]))
    assert (1, 4, 1) in shares(scheduler.schedule())


def test_many_that_share_a_prefix_compute_it_once_though_all_come_at_once():
    scheduler = make_scheduler(num_pages=60, max_num_seqs=8, max_num_batched_tokens=10)
    add(scheduler, *(make_sequence(i, [*range(22), 30 + i, 40, 41]) for i in range(8)))
    computed = 0
    while scheduler.num_waiting or any(row.q_len > 1 for row in plan.rows):
        plan = scheduler.schedule()
        computed += sum(row.q_len for row in plan.rows if row.start < row.seq.num_prompt_tokens)
        commit(scheduler, plan)
    assert computed == 25 + 7 * (25 - 20)


def test_running_prompts_take_over_what_others_with_the_same_prompt_did():
    """With few tokens of one prompt a step, each goes on where the one before it ends."""
    scheduler = make_scheduler(num_pages=60, long_prefill_token_threshold=5)
    add(scheduler, *(make_sequence(i, [*range(22), 30 + i]) for i in range(3)))
    assert shares(scheduler.schedule()) == [(0, 0, 4), (1, 4, 4), (2, 8, 4)]
    assert shares(scheduler.schedule()) == [(0, 12, 4), (1, 16, 4), (2, 20, 3)]
    assert shares(scheduler.schedule()) == [(0, 20, 3), (1, 20, 3), (2, 23, 1)]


def test_pages_of_a_failed_step_never_reach_the_cache():
    scheduler = make_scheduler()
    (seq,) = add(scheduler, make_sequence(0, prompt(0, 8)))
    plan = scheduler.schedule()
    assert len(scheduler.cache) == 2
    scheduler.finish(seq, "error", None)
    commit(scheduler, plan)
    assert (len(scheduler.cache), scheduler.pool.num_held) == (0, 0)


def test_without_prefix_caching_nothing_is_registered():
    scheduler = make_scheduler(enable_prefix_caching=False)
    finished(scheduler, make_sequence(0, prompt(0, 12)))
    assert (len(scheduler.cache), scheduler.pool.num_cached) == (0, 0)


@pytest.mark.parametrize("window", [0, 6])
def test_a_second_answer_that_fills_the_pool_copies_no_page_beside_it(window):
    """The page that both prompts end in and a copy of it would be one page too many."""
    limits = {"max_model_len": 48, "max_num_batched_tokens": 16}
    scheduler = make_scheduler(num_pages=13, window=window, num_local_pages=8, **limits)
    params = SamplingParams(max_tokens=2, n=2, ignore_eos=True)
    fields = {"params": params, "request_id": "both"}
    seqs = [make_sequence(i, prompt(0, 46), 2, choice=i, **fields) for i in range(2)]
    add(scheduler, *seqs)
    Loop(scheduler).run()
    assert [len(seq.output_token_ids) for seq in seqs] == [2, 2]
