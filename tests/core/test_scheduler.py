import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.sequence import SeqState
from jaxpaged.errors import ConfigError, InvariantError, PromptTooLong, RequestError
from tests.core.fake_device import (
    EOS,
    Loop,
    add,
    commit,
    make_limits,
    make_scheduler,
    make_sequence,
    prompt,
    shares,
)

# --- what a step holds


def test_a_prompt_is_cut_by_the_token_budget_and_samples_at_its_end():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_sequence(0, prompt(0, 10)))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [shares(plan) for plan in plans] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]
    assert [plan.rows[0].samples for plan in plans] == [False, False, True]


def test_running_sequences_come_before_waiting_ones():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    first, second = make_sequence(0, prompt(0, 5)), make_sequence(1, prompt(10, 9))
    add(scheduler, first, second)
    assert shares(scheduler.schedule()) == [(0, 0, 5), (1, 0, 1)]
    assert shares(scheduler.schedule()) == [(0, 5, 1), (1, 1, 5)]


def test_nobody_overtakes_a_waiting_sequence_that_does_not_fit():
    scheduler = make_scheduler(num_pages=9, reserve_full_prompt=True)
    add(scheduler, make_sequence(0, prompt(0, 15)), make_sequence(1, prompt(20, 29)))
    add(scheduler, make_sequence(2, prompt(60, 2)))
    assert shares(scheduler.schedule()) == [(0, 0, 15)]
    assert shares(scheduler.schedule()) == [(0, 15, 1)]


def test_the_threshold_leaves_room_beside_a_long_prompt():
    scheduler = make_scheduler(long_prefill_token_threshold=5)
    add(scheduler, make_sequence(0, prompt(0, 30)), make_sequence(1, prompt(40, 4)))
    assert shares(scheduler.schedule()) == [(0, 0, 4), (1, 0, 4)]


def test_sequences_beyond_max_num_seqs_wait_for_a_slot():
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = add(scheduler, *(make_sequence(i, [i]) for i in range(3)))
    plan = scheduler.schedule()
    assert sorted(row.slot for row in plan.rows) == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.abort(seqs[0])
    assert shares(scheduler.schedule()) == [(1, 1, 1), (2, 0, 1)]
    assert seqs[2].slot == 0


def test_a_sequence_is_not_computed_beyond_its_last_token_while_tokens_are_in_flight():
    scheduler = make_scheduler()
    (seq,) = add(scheduler, make_sequence(0, prompt(0, 3), max_tokens=2))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [shares(plan) for plan in plans] == [[(0, 0, 3)], [(0, 3, 1)]]
    assert not scheduler.schedule()
    assert scheduler.has_work
    assert commit(scheduler, plans[0]) == [seq]
    assert not scheduler.schedule()
    assert commit(scheduler, plans[1]) == [seq]
    assert (seq.finish_reason, seq.output_token_ids) == ("length", [9, 9])
    assert not scheduler.has_work


def test_the_context_ends_a_sequence():
    scheduler = make_scheduler(max_model_len=6)
    (seq,) = add(scheduler, make_sequence(0, prompt(0, 4), max_tokens=50))
    Loop(scheduler).run()
    assert len(seq.token_ids) <= 6
    assert seq.finish_reason in ("length", "stop")
    assert seq.num_computed_tokens <= 5


def test_a_sequence_with_banned_runs_waits_until_its_token_is_read():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0, [1, 2], banned_runs=((3, 4),)), make_sequence(1, [5]))
    plan = scheduler.schedule()
    assert shares(scheduler.schedule()) == [(1, 1, 1)]
    commit(scheduler, plan)
    assert shares(scheduler.schedule()) == [(0, 2, 1), (1, 2, 1)]


# --- ends


@pytest.mark.parametrize(
    ("options", "token", "reason", "stop_reason"),
    [
        ({}, EOS, "stop", None),
        ({"ignore_eos": True}, EOS, None, None),
        ({"stop_token_ids": [8]}, 8, "stop", 8),
        ({"stop_token_ids": [EOS]}, EOS, "stop", None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, "stop", EOS),
        ({"stop_token_ids": [8], "min_tokens": 1}, 8, None, None),
        ({"max_tokens": 1}, 9, "length", None),
    ],
)
def test_the_first_token_ends_a_sequence(options, token, reason, stop_reason):
    params = SamplingParams(**{"max_tokens": 4} | options)
    scheduler = make_scheduler()
    (seq,) = add(scheduler, make_sequence(0, [1], params.max_tokens, params=params))
    assert commit(scheduler, scheduler.schedule(), token) == [seq]
    assert (seq.finish_reason, seq.stop_reason) == (reason, stop_reason)
    assert (seq.state is SeqState.FINISHED) == (reason is not None)
    assert scheduler.pool.num_held == (reason is None)


def test_prompt_scoring_computes_the_prompt_and_keeps_no_token():
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (seq,) = add(scheduler, make_sequence(0, prompt(0, 6), 0, params=params))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [shares(first), shares(second)] == [[(0, 0, 4)], [(0, 4, 2)]]
    assert not scheduler.schedule()
    assert commit(scheduler, first) == []
    assert commit(scheduler, second) == [seq]
    assert (seq.finish_reason, seq.output_token_ids) == ("length", [])


def test_what_is_in_flight_for_a_finished_sequence_is_ignored():
    scheduler = make_scheduler()
    (seq,) = add(scheduler, make_sequence(0, [1, 2]))
    plans = [scheduler.schedule(), scheduler.schedule()]
    commit(scheduler, plans[0], 7)
    scheduler.finish(seq, "stop", "the end")
    assert commit(scheduler, plans[1], 8) == []
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == ([7], "stop", "the end")
    scheduler.abort(seq)
    assert seq.finish_reason == "stop"
    scheduler.check()


def test_a_waiting_sequence_can_be_aborted():
    scheduler = make_scheduler()
    (seq,) = add(scheduler, make_sequence(0))
    scheduler.abort(seq)
    assert (seq.finish_reason, scheduler.has_work) == ("abort", False)


def test_a_sampling_row_without_a_token_is_refused():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0))
    with pytest.raises(InvariantError, match="sampled no token"):
        scheduler.commit(scheduler.schedule(), [None])


# --- refusals


def test_what_can_never_fit_into_the_pool_is_refused_with_both_page_counts():
    scheduler = make_scheduler(num_pages=5)
    with pytest.raises(RequestError, match=r"need 5 pages of 4 tokens, the pool has 4\b") as error:
        scheduler.add(make_sequence(0, prompt(0, 10), max_tokens=8))
    assert error.value.param == "max_tokens"
    scheduler.add(make_sequence(1, prompt(0, 10), max_tokens=7))
    assert scheduler.num_waiting == 1


def test_a_prompt_that_leaves_no_place_for_a_token_is_refused():
    scheduler = make_scheduler(max_model_len=8)
    with pytest.raises(PromptTooLong, match="8 tokens"):
        scheduler.add(make_sequence(0, prompt(0, 8), max_tokens=1))
    scheduler.add(make_sequence(1, prompt(0, 8), max_tokens=0))


def test_more_edits_than_a_row_has_places_are_refused():
    with pytest.raises(RequestError, match="name 513 ids, at most 512"):
        make_scheduler().add(make_sequence(0, banned_ids=tuple(range(513))))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_of_zero_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0, must be 1 or more"):
        make_limits(**{name: 0})


@pytest.mark.parametrize(
    ("reserves", "rows"), [(True, [(0, 0, 4)]), (False, [(0, 0, 4), (1, 0, 4)])]
)
def test_a_full_prompt_is_admitted_only_with_all_its_pages_unclaimed(reserves, rows):
    """Of 8 pages the first prompt holds 1 and claims 4; the second one needs 4."""
    scheduler = make_scheduler(
        num_pages=9, reserve_full_prompt=reserves, long_prefill_token_threshold=4
    )
    add(scheduler, make_sequence(0, prompt(0, 20)), make_sequence(1, prompt(30, 16)))
    assert shares(scheduler.schedule()) == rows


def test_a_prompt_that_runs_already_keeps_its_claim():
    scheduler = make_scheduler(
        num_pages=9, reserve_full_prompt=True, long_prefill_token_threshold=4
    )
    add(scheduler, make_sequence(0, prompt(0, 20)))
    scheduler.schedule()
    add(scheduler, make_sequence(1, prompt(30, 16)))
    assert shares(scheduler.schedule()) == [(0, 4, 4)]


# --- prompt logprobs and penalties


def scored(seq_id, first, num_tokens):
    params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    return make_sequence(seq_id, prompt(first, num_tokens), params=params)


def test_a_step_that_scores_a_prompt_stays_small():
    scheduler = make_scheduler(max_num_scored_tokens=6)
    add(scheduler, make_sequence(0, [1]), scored(1, 10, 9), make_sequence(2, prompt(30, 4)))
    assert shares(scheduler.schedule()) == [(0, 0, 1), (1, 0, 5)]
    # scoring ends with the token before the prompt's last one, here within this step
    assert shares(scheduler.schedule()) == [(0, 1, 1), (1, 5, 4), (2, 0, 1)]


def test_a_prompt_to_score_gets_its_turn_beside_many_others():
    scheduler = make_scheduler(max_num_scored_tokens=4, max_num_seqs=8)
    add(scheduler, *(make_sequence(i, [i], 40) for i in range(6)), scored(6, 10, 5))
    assert all(seq_id != 6 for seq_id, *_ in shares(scheduler.schedule()))
    assert shares(scheduler.schedule()) == [(0, 1, 1), (1, 1, 1), (6, 0, 2)]


# --- bookkeeping


def test_check_finds_a_waiting_sequence_that_holds_pages():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0))
    scheduler._waiting.first().page_ids = [1]
    with pytest.raises(InvariantError, match="is waiting with 1 pages"):
        scheduler.check()
