"""Requests in the background, under every policy."""

import pytest

from jaxpaged.core.policies import BACKGROUND
from tests.core.fake_device import add, commit, make_scheduler, make_sequence, prompt, shares

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "sjf"])


@POLICIES
def test_what_is_live_is_admitted_first_though_it_came_last(policy):
    scheduler = make_scheduler(max_num_seqs=2, scheduling_policy=policy)
    add(scheduler, *[make_sequence(i, [i], 1, priority=BACKGROUND) for i in range(2)])
    add(scheduler, make_sequence(2, prompt(7, 9), 1))
    assert [seq.seq_id for seq in scheduler._waiting] == [2, 0, 1]
    assert [seq_id for seq_id, *_ in shares(scheduler.schedule())] == [2, 0]


@POLICIES
def test_the_background_gives_way_though_it_is_the_oldest(policy):
    scheduler = make_scheduler(
        num_pages=7, max_num_batched_tokens=32, max_num_seqs=4, scheduling_policy=policy
    )
    ranks = [BACKGROUND, 0, 0]
    seqs = [make_sequence(i, prompt(20 * i, 7), 12, priority=ranks[i]) for i in range(3)]
    add(scheduler, *seqs)
    plans = [scheduler.schedule(), scheduler.schedule()]
    commit(scheduler, plans[0])
    assert shares(scheduler.schedule()) == [(1, 8, 1), (2, 8, 1)]
    assert seqs[0].num_preemptions == 1
    scheduler.check()


def test_once_the_background_is_empty_it_costs_nothing():
    scheduler = make_scheduler()
    line = scheduler._waiting
    seq = make_sequence(0, [0], 1, priority=BACKGROUND)
    add(scheduler, seq)
    commit(scheduler, scheduler.schedule())
    assert line._has_background
    assert seq.finish_reason is not None
    add(scheduler, make_sequence(1, [1], 1))
    scheduler.schedule()
    assert not line._has_background
