"""Steps through several stages of devices: who takes turns, and that no stage waits for another."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.params import SamplingParams
from tests.core.fake_device import (
    Loop,
    add,
    commit,
    generate_alone,
    make_scheduler,
    make_sequence,
    outcome,
    shares,
)


def ids(plan):
    return [row.seq.seq_id for row in plan.rows]


def busy_share(plans, num_stages):
    """Of the stages' time, if each takes 1 for a step and the host none.

    A step enters the first stage when that is free, and when the steps have left the last one whose
    tokens it takes without the host having read them: `plans` are rows, and the steps in flight.
    """
    free_at, left_at, total = [0] * num_stages, dict[int, int](), 0
    for number, (rows, in_flight) in enumerate(plans):
        needed = [step for step in in_flight if set(rows) & set(plans[step][0])]
        time = max([left_at[step] for step in needed], default=0)
        for stage in range(num_stages):
            time = free_at[stage] = max(time, free_at[stage]) + 1
        left_at[number] = total = time
    return len(plans) * num_stages / (num_stages * total)


def decode_together(num_stages, num_seqs, num_tokens=24):
    """The plans of sequences that come at once, each with the steps in flight when it was made."""
    scheduler = make_scheduler(
        num_pages=200, max_num_seqs=num_seqs, max_num_batched_tokens=64, num_stages=num_stages
    )
    add(scheduler, *(make_sequence(i, (i, 1), num_tokens) for i in range(num_seqs)))
    plans, in_flight = [], deque()
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule()
        if plan:
            plans.append((ids(plan), [number for number, _ in in_flight]))
            in_flight.append((len(plans) - 1, plan))
        if not plan or len(in_flight) > num_stages:
            commit(scheduler, in_flight.popleft()[1])
    return plans


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_seqs", [4, 7, 32])
def test_all_stages_work_while_there_is_a_decode_for_each(num_stages, num_seqs):
    plans = decode_together(num_stages, num_seqs)
    steady = plans[1 : 1 + 20 * num_stages]
    sizes = {len(rows) for rows, _ in steady}
    assert max(sizes) == -(-num_seqs // num_stages)
    for first in range(1, 20 * num_stages):
        together = [seq for rows, _ in plans[first : first + num_stages] for seq in rows]
        assert len(set(together)) == len(together), "a step waits for one before it"
    assert busy_share(plans, num_stages) > 0.85
    # the measure tells: if nobody took turns, one stage would work at a time
    in_step = [(rows, [i - 1] if i else []) for i, (rows, _) in enumerate(plans)]
    everybody = [(range(num_seqs), before) for _, before in in_step]
    assert busy_share(everybody, num_stages) == pytest.approx(1 / num_stages)


def test_one_sequence_alone_is_in_every_step():
    assert [rows for rows, _ in decode_together(4, 1, 6)] == [[0]] * 6


def test_prompts_wait_for_no_turn_and_newcomers_find_theirs():
    scheduler = make_scheduler(max_num_batched_tokens=4, num_stages=2)
    a, b = add(scheduler, make_sequence(0, (1,)), make_sequence(1, (2,)))
    scheduler.schedule()
    (long,) = add(scheduler, make_sequence(2, range(9)))
    assert shares(scheduler.schedule()) == [(2, 0, 4)]  # the others are on their way
    assert shares(scheduler.schedule()) == [(0, 1, 1), (2, 4, 3)]
    assert shares(scheduler.schedule()) == [(1, 1, 1), (2, 7, 2)]
    assert (a.num_in_flight, b.num_in_flight, long.num_in_flight) == (2, 2, 1)
    assert shares(scheduler.schedule()) == [(0, 2, 1)]
    assert shares(scheduler.schedule()) == [(1, 2, 1), (2, 9, 1)]


@st.composite
def jobs(draw):
    prompt = draw(st.lists(st.integers(6, 9), min_size=1, max_size=14))
    options = draw(st.sampled_from([{}, {"presence_penalty": 0.5}, {"min_tokens": 2}]))
    return prompt, SamplingParams(temperature=0.0, max_tokens=draw(st.integers(2, 9)), **options)


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(jobs(), min_size=1, max_size=7),
    num_stages=st.integers(2, 4),
    num_pages=st.integers(8, 24),
    token_budget=st.integers(4, 16),
    speculation=st.sampled_from([None, Speculation("ngram", 3, 3, 1)]),
)
def test_turns_change_no_answer_and_everybody_gets_one(
    work, num_stages, num_pages, token_budget, speculation
):
    scheduler = make_scheduler(
        num_pages=num_pages,
        num_stages=num_stages,
        max_num_batched_tokens=token_budget,
        speculation=speculation,
    )
    seqs = [
        make_sequence(i, prompt, params.max_tokens, params=params)
        for i, (prompt, params) in enumerate(work)
    ]
    Loop(scheduler, max_in_flight=num_stages + 1).run(seqs)
    for seq in seqs:
        assert outcome(seq) == generate_alone(seq.request, scheduler.limits.max_model_len)
