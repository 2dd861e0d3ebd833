import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.trace import MAX_RUNS, Trace
from tests.core.fake_device import Loop, add, commit, make_scheduler, make_sequence, prompt

WIDE = {"max_num_batched_tokens": 64}


def trace(scheduler, seq):
    scheduler.traces[seq.seq_id] = found = Trace(seq)
    scheduler.add(seq)
    return found


@pytest.mark.parametrize(
    ("limits", "others", "causes"),
    [
        ({"max_num_seqs": 1}, [3], {"slots": 2}),
        ({"num_pages": 9, "admission": "no-evict", **WIDE}, [20], {"pages": 2}),
        ({"max_num_batched_tokens": 4}, [12], {"tokens": 2}),
        ({"num_pages": 9, "admission": "no-evict", **WIDE}, [20, 20], {"line": 2}),
    ],
)
def test_a_waiting_sequence_knows_what_it_waits_for(limits, others, causes):
    scheduler = make_scheduler(**limits)
    add(scheduler, *(make_sequence(i + 1, prompt(30 * i, n), 6) for i, n in enumerate(others)))
    found = trace(scheduler, make_sequence(0, prompt(90, 12)))
    for _ in range(2):
        scheduler.schedule()
    assert dict(found.waits) == causes


def test_tokens_per_step_are_kept_in_runs_and_no_more_than_so_many():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    found = trace(scheduler, make_sequence(0, prompt(0, 10), 5))
    for _ in range(6):
        commit(scheduler, scheduler.schedule())
    assert found.q_lens == [(4, 2), (2, 1), (1, 3)]
    for q_len in range(2 * MAX_RUNS):
        found.ran(q_len + 5)
    assert len(found.q_lens) == MAX_RUNS


@pytest.mark.parametrize(
    ("limits", "params", "page", "why"),
    [
        ({}, {}, 2, "never computed with this salt, or evicted"),
        ({"enable_prefix_caching": False}, {}, 0, "caching is off"),
        ({}, {"skip_reading_prefix_cache": True}, 0, "asked not to read"),
        ({}, {"prompt_logprobs": 1}, 0, "every token computed"),
    ],
)
def test_the_first_page_that_missed_is_told_with_the_reason(limits, params, page, why):
    scheduler = make_scheduler(**limits)
    loop = Loop(scheduler)
    loop.run([make_sequence(1, prompt(0, 9), 1)])
    params = SamplingParams(temperature=0.0, max_tokens=1, **params)
    found = trace(scheduler, make_sequence(0, [*prompt(0, 8), *prompt(70, 6)], 1, params=params))
    loop.run()
    assert found.first_missed_page == page
    assert why in found.why_missed


def test_a_prompt_that_was_found_whole_missed_nothing():
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    loop.run([make_sequence(1, prompt(0, 9), 1)])
    found = trace(scheduler, make_sequence(0, prompt(0, 9), 1))
    loop.run()
    assert (found.first_missed_page, found.why_missed[:19]) == (2, "none was missed: th")
