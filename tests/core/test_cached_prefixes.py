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


def test_pages_of_a_step_in_flight_are_not_found():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0, prompt(0, 8)))
    plan = scheduler.schedule()
    add(scheduler, make_sequence(1, prompt(0, 8)))
    assert shares(scheduler.schedule()) == [(0, 8, 1), (1, 0, 8)]
    assert len(scheduler.cache) == 0
    commit(scheduler, plan)
    assert len(scheduler.cache) == 2
    add(scheduler, make_sequence(2, prompt(0, 9)))
    assert (2, 8, 1) in shares(scheduler.schedule())


def test_a_step_registers_no_page_that_only_the_next_step_fills():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_sequence(0, prompt(0, 8)))
    first = scheduler.schedule()
    scheduler.schedule()
    commit(scheduler, first)
    assert len(scheduler.cache) == 1


def test_pages_of_a_failed_step_never_reach_the_cache():
    scheduler = make_scheduler()
    (seq,) = add(scheduler, make_sequence(0, prompt(0, 8)))
    plan = scheduler.schedule()
    scheduler.finish(seq, "error", None)
    commit(scheduler, plan)
    assert (len(scheduler.cache), scheduler.pool.num_held) == (0, 0)


def test_without_prefix_caching_nothing_is_registered():
    scheduler = make_scheduler(enable_prefix_caching=False)
    finished(scheduler, make_sequence(0, prompt(0, 12)))
    assert (len(scheduler.cache), scheduler.pool.num_cached) == (0, 0)
