"""A sequence is admitted only where pages suffice until all that run have ended."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.foresight import FEWEST, HISTORY, _Outlook
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.policies import BACKGROUND
from jaxpaged.core.request import Pin
from jaxpaged.core.trace import Trace
from tests.core.fake_device import (
    EOS,
    Loop,
    add,
    commit,
    generate_alone,
    make_scheduler,
    make_sequence,
    outcome,
    prompt,
    shares,
)

WIDE = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


def fixed(seq_id, tokens, max_tokens, *, priority=0, **fields):
    """A sequence whose length is known."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)
    return make_sequence(seq_id, tokens, max_tokens, params=params, priority=priority)


def foreseeing(num_pages, **limits):
    return make_scheduler(num_pages, admission="foresee", **WIDE | limits)


def admitted(scheduler, *seqs):
    add(scheduler, *seqs)
    found = [seq_id for seq_id, _, _ in shares(scheduler.schedule())]
    scheduler.check()
    return found


def finish_many(scheduler, lengths):
    """Answers of these lengths come and go, each ended by an end-of-text token."""
    for i, length in enumerate(lengths):
        seq = make_sequence(1000 + i, [1 + i % 30], 30)
        add(scheduler, seq)
        for made in range(1, length + 1):
            commit(scheduler, scheduler.schedule(), EOS if made == length else 9)
        assert (len(seq.output_token_ids), seq.finish_reason) == (length, "stop")
    assert scheduler.pool.num_held == 0


rows = st.tuples(st.integers(0, 40), st.integers(-9, 30), st.integers(0, 12))


@given(st.lists(rows, max_size=12), st.integers(0, 5), st.sampled_from([1, 2, 4, 16]))
def test_the_most_pages_needed_are_those_of_a_walk_through_all_steps(rows, constant, page_size):
    rows = [(end, max(missing, 1 - page_size), freed) for end, missing, freed in rows]
    ends, missing, freed = np.array(rows, np.int64).reshape(-1, 3).T
    needed = [
        sum(-(-(more + now) // page_size) for end, more, _ in rows if end >= now)
        - sum(back for end, _, back in rows if end < now)
        for now in range(max(ends, default=-1) + 1)
    ]
    found = _Outlook(ends, missing, freed, constant).most_needed(page_size)
    assert found == constant + max(needed, default=0)


def test_one_is_admitted_that_grows_once_another_has_ended():
    """5 and 6 pages in the end, 8 there are; but the short one ends before the long one grows."""

    def pair():
        return fixed(0, prompt(0, 16), 4), fixed(1, prompt(20, 4), 21)

    assert admitted(make_scheduler(9, admission="no-evict", **WIDE), *pair()) == [0]
    assert admitted(foreseeing(9), *pair()) == [0, 1]
    scheduler = foreseeing(9)
    Loop(scheduler).run(pair())
    assert scheduler.num_preemptions == 0


def test_one_waits_whose_pages_would_run_out_while_the_others_still_run():
    def pair():
        return fixed(0, prompt(0, 16), 16), fixed(1, prompt(20, 4), 16)

    assert admitted(make_scheduler(12, **WIDE), *pair()) == [0, 1]
    assert admitted(foreseeing(12), *pair()) == [0]  # 8 and 5 pages at the same time, 11 there are
    assert admitted(foreseeing(14), *pair()) == [0, 1]


def storm(admission, params=None):
    scheduler = make_scheduler(17, admission=admission, **WIDE)
    seqs = [
        make_sequence(i, prompt(3 * i, 1 + i % 7), 5 + 7 * i % 30, params=params) for i in range(32)
    ]
    loop = Loop(scheduler)
    loop.run(seqs)
    assert all(outcome(seq) == generate_alone(seq.request, 64) for seq in seqs)
    return scheduler.num_preemptions, loop.num_steps


def test_fewer_pages_are_left_empty_than_without_eviction():
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    evict, foresee, no_evict = (storm(mode, endless) for mode in ("evict", "foresee", "no-evict"))
    assert evict[0] > 5
    assert foresee[0] == no_evict[0] == 0
    assert foresee[1] < no_evict[1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 28)), min_size=2, max_size=24),
    st.integers(13, 40),
    st.integers(2, 12),
    st.booleans(),
)
def test_nothing_is_preempted_where_lengths_are_known(lengths, num_pages, slots, enable):
    """And prompts are computed in one step."""
    limits = {"max_num_batched_tokens": 512, "enable_prefix_caching": enable}
    scheduler = foreseeing(num_pages, max_num_seqs=slots, **limits)
    Loop(scheduler).run(
        fixed(i, prompt(5 * i, num_tokens), max_tokens)
        for i, (num_tokens, max_tokens) in enumerate(lengths)
    )
    assert scheduler.num_preemptions == 0


def test_without_a_history_an_answer_that_may_stop_is_taken_not_to_grow():
    assert storm("foresee") == storm("evict")


@pytest.mark.parametrize(("num_answers", "found"), [(FEWEST - 1, [0, 1, 2]), (FEWEST, [0, 1])])
def test_the_lengths_of_late_foretell_those_that_may_stop(num_answers, found):
    """Each takes 3 pages and then 2 more, 11 there are."""
    scheduler = foreseeing(12)
    finish_many(scheduler, [8] * num_answers)
    assert (
        admitted(scheduler, *(make_sequence(i, prompt(20 * i, 12), 30) for i in range(3))) == found
    )


@pytest.mark.parametrize(("longest", "found"), [(3, [0, 1]), (29, [0])])
def test_an_answer_longer_than_all_of_late_is_taken_to_stay_as_it_is(longest, found):
    """With 4 pages it leaves the 7 that the other one will need; growing, it would not."""
    scheduler = foreseeing(12)
    finish_many(scheduler, [3] * FEWEST + [longest])
    scheduler.add(make_sequence(0, prompt(0, 5), 29))
    for _ in range(8):
        commit(scheduler, scheduler.schedule())
    assert admitted(scheduler, fixed(1, prompt(12, 12), 16)) == found


def test_only_ends_of_their_own_accord_count():
    scheduler = foreseeing(33)
    seqs = [make_sequence(i, [i + 1], 30) for i in range(8)]
    add(scheduler, *seqs)
    loop = Loop(scheduler)
    loop.step()
    loop.step()
    scheduler.abort(seqs[0])
    scheduler.finish(seqs[1], "error", None)
    scheduler.finish(seqs[2], "stop", "a stop string")
    scheduler.add(fixed(20, [3], 1))
    loop.run()
    lengths = [len(seq.output_token_ids) for seq in seqs[2:]]
    assert sorted(scheduler._reuse._foresight._lengths) == sorted(lengths)


def test_of_the_history_the_last_ones_count():
    scheduler = foreseeing(33)
    finish_many(scheduler, [9] * 40 + [2, 3] * (HISTORY // 2))
    foresight = scheduler._reuse._foresight
    assert foresight._by_length == sorted(foresight._lengths) == [2] * 128 + [3] * 128


def test_pages_shared_with_others_are_counted_once():
    """A prefix of 4 pages and 3 each in the end; 13 are enough for three, as none ends sooner."""
    prefix = list(prompt(0, 16))

    def seqs():
        return [fixed(i, [*prefix, 30 + i], 11) for i in range(4)]

    first, *others = seqs()
    scheduler = foreseeing(14)
    assert admitted(scheduler, first) == [0]
    assert admitted(scheduler, *others) == [0, 1, 2]
    scheduler = foreseeing(14, enable_prefix_caching=False)
    assert admitted(scheduler, *seqs()) == [0]


def test_pages_that_others_hold_do_not_come_back():
    """Of 10 pages a pin holds 4: the first one's end gives back 1, not the 5 that it has."""

    def run(num_pages, *, is_pinned):
        scheduler = foreseeing(num_pages)
        prefix = list(prompt(0, 16))
        scheduler.add(first := fixed(0, [*prefix, 20], 3))
        scheduler.schedule()
        if is_pinned:
            scheduler.pool.share(first.page_ids[:4])
        scheduler.add(fixed(1, prompt(24, 4), 18))
        return [seq_id for seq_id, _, _ in shares(scheduler.schedule())]

    assert run(8, is_pinned=False) == [0, 1]
    assert run(8, is_pinned=True) == [0]
    assert run(11, is_pinned=True) == [0, 1]


def test_where_nobody_runs_one_that_takes_the_whole_pool_is_admitted():
    def pair():
        return fixed(0, prompt(0, 4), 29), fixed(1, prompt(8, 4), 29)

    assert admitted(foreseeing(9), *pair()) == [0]
    scheduler = foreseeing(9)
    Loop(scheduler).run(pair())
    assert scheduler.num_preemptions == 0


def test_where_nobody_runs_the_next_one_is_admitted_whatever_is_foretold():
    scheduler = foreseeing(9)
    scheduler.pool.take(1)  # as by what is no sequence
    add(scheduler, fixed(0, prompt(0, 4), 29))
    assert shares(scheduler.schedule()) == [(0, 0, 4)]


def test_one_that_was_refused_comes_when_another_leaves():
    scheduler = foreseeing(15)
    lengths = (16, 16), (4, 24), (4, 24)
    seqs = [fixed(i, prompt(16 * i, n), most) for i, (n, most) in enumerate(lengths)]
    assert admitted(scheduler, *seqs) == [0, 1]
    assert admitted(scheduler) == [0, 1]
    scheduler.abort(seqs[0])
    assert admitted(scheduler) == [1, 2]


def test_one_that_was_refused_comes_once_the_others_end_before_it_has_grown():
    """8 pages each in the end, 12 there are: when the first one ends, the other must have 4."""
    scheduler = foreseeing(13)
    seqs = [fixed(i, prompt(20 * i, 4), 28) for i in range(2)]
    add(scheduler, *seqs)
    while seqs[1].slot is None:
        commit(scheduler, scheduler.schedule())
    assert 12 <= len(seqs[0].output_token_ids) < 12 + 2 * scheduler.pool.page_size
    while scheduler.has_work:
        commit(scheduler, scheduler.schedule())
    assert scheduler.num_preemptions == 0


def test_one_that_was_refused_comes_soon_once_a_pinned_prefix_is_dropped():
    """10 pages each in the end, 20 there are, of which 3 are pinned."""
    scheduler = foreseeing(21)
    params = SamplingParams(temperature=0.0, max_tokens=0)
    Loop(scheduler).run([make_sequence(9, prompt(20, 12), 0, params=params, pin=Pin("warm"))])
    assert scheduler.pool.num_held == 3
    seqs = [fixed(i, prompt(3 * i, 4), 36) for i in range(2)]
    add(scheduler, *seqs)
    commit(scheduler, scheduler.schedule())
    assert seqs[1].slot is None
    assert scheduler.drop_prefix("warm")
    for _ in range(scheduler.pool.page_size):
        commit(scheduler, scheduler.schedule())
    assert seqs[1].slot is not None


@pytest.mark.parametrize(
    ("policy", "first", "second", "found"),
    [
        ("fcfs", BACKGROUND, 0, [0, 1]),
        ("fcfs", BACKGROUND + 1, BACKGROUND, [0]),
        ("fcfs", 0, BACKGROUND, [0]),
        ("fcfs", 1, 0, [0]),
        ("priority", 1, 0, [0, 1]),
        ("priority", 0, 1, [0]),
        ("priority", BACKGROUND + 1, BACKGROUND, [0]),
    ],
)
def test_one_does_not_wait_for_those_that_give_way_to_it(policy, first, second, found):
    """8 pages each in the end, 12 there are."""
    scheduler = foreseeing(13, scheduling_policy=policy)
    add(scheduler, fixed(0, prompt(0, 4), 28, priority=first))
    loop = Loop(scheduler)
    loop.step()
    add(scheduler, seq := fixed(1, prompt(20, 4), 28, priority=second))
    loop.step()
    assert [seq.seq_id for seq in scheduler.running] == found
    loop.run()
    assert scheduler.num_preemptions == len(found) - 1
    assert not seq.num_preemptions


@pytest.mark.parametrize(
    ("policy", "priorities"),
    [("fcfs", [0, BACKGROUND, 0, BACKGROUND]), ("priority", [-1, 0, -1, 0])],
)
def test_within_a_plan_each_one_counts_those_that_do_not_give_way_to_it(policy, priorities):
    """6 pages in the end, for one 8, and 18 there are: the last one finds room without the 8."""
    scheduler = foreseeing(19, scheduling_policy=policy)
    lengths = 20, 28, 20, 20
    seqs = [fixed(i, prompt(9 * i, 4), lengths[i], priority=priorities[i]) for i in range(4)]
    assert admitted(scheduler, *seqs[:2]) == [0, 1]
    assert admitted(scheduler, *seqs[2:]) == [0, 1, 2]


def test_pages_of_those_that_give_way_count_as_free():
    """Of 12 pages one in the background holds 7 and would take 8; the two others take 6 each."""
    scheduler = foreseeing(13)
    add(scheduler, fixed(0, prompt(0, 26), 7, priority=BACKGROUND))
    loop = Loop(scheduler)
    loop.step()
    add(scheduler, *(fixed(i, prompt(20 + i, 4), 20) for i in (1, 2)), fixed(3, [3], 20))
    loop.step()
    assert [seq.seq_id for seq in scheduler.running] == [0, 1, 2]


def test_cached_pages_that_nobody_holds_are_taken_by_whom_they_are_shared():
    """8 pages in the end, of which 3 are found, beside 5 of another, and 12 there are."""
    scheduler = foreseeing(13)
    Loop(scheduler).run([fixed(9, prompt(0, 14), 2)])
    assert admitted(scheduler, fixed(0, prompt(20, 4), 16), fixed(1, prompt(0, 14), 18)) == [0]


def test_one_that_is_refused_waits_for_pages():
    scheduler = foreseeing(12)
    second = fixed(1, prompt(20, 4), 16)
    scheduler.traces[1] = trace = Trace(second)
    assert admitted(scheduler, fixed(0, prompt(0, 16), 16), second) == [0]
    assert dict(trace.waits) == {"pages": 1}


@pytest.mark.parametrize(("num_pages", "kept"), [(12, 3), (17, 4)])
def test_one_that_is_refused_does_not_keep_the_prompt_before_it_whole(num_pages, kept):
    """5 and 4 tokens of the steps' sizes of 4, 8 and 16; the third one never fits in 11 pages."""
    scheduler = foreseeing(num_pages, step_sizes=(4, 8, 16))
    ends = {"output_kind": OutputKind.FINAL_ONLY}
    seqs = [fixed(i, prompt(12 * i, n), 16, **ends) for i, n in enumerate((5, 4, 4))]
    add(scheduler, *seqs)
    found = shares(scheduler.schedule())
    assert found[:2] == [(0, 0, 5), (1, 0, kept)]
    assert len(found) == (3 if kept == 4 else 2)
