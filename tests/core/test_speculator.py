import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.config.speculation import MAX_DRAFT_ROWS, MAX_DRAFT_TOKENS, Speculation
from jaxpaged.core import speculator
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.recording import RecordedScheduler, replay
from jaxpaged.core.speculation import best_lengths, count_right
from jaxpaged.core.speculator import _Text
from tests.core.fake_device import (
    VOCAB,
    Loop,
    commit,
    generate_alone,
    make_limits,
    make_scheduler,
    make_sequence,
    outcome,
    pick,
)

SPECULATION = Speculation("ngram", 3, 3, 1)


def pick_again(prefix, *edits):
    """Mostly a function of the last token, so that texts repeat; now and then of all of them."""
    depends_on_all = zlib.crc32(repr(list(prefix)).encode()) % 16 == 0
    return pick(prefix if depends_on_all else prefix[-1:], *edits)


def run_all(seqs, *, pick=pick_again, scheduler=None, guess=None, **limits):
    """Run sequences to their end on a device that samples with `pick`; how many were guessed."""
    limits = {"speculation": SPECULATION, "max_model_len": 160} | limits
    scheduler = scheduler or make_scheduler(num_pages=limits.pop("num_pages", 81), **limits)
    loop, guessed = Loop(scheduler, guess=guess), []
    loop.device.pick = pick
    run = loop.device.run

    def watched(plan, batch):
        guessed.extend(plan.drafts.values())
        return run(plan, batch)

    loop.device.run = watched
    loop.run(seqs)
    assert scheduler.pool.num_held == 0
    return guessed


def some_sequences(count=3, seed=0, **fields):
    rng = np.random.default_rng(seed)
    return [
        make_sequence(i, rng.integers(6, 37, rng.integers(1, 12)).tolist(), 60, **fields)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"num_pages": 22, "max_num_seqs": 3},  # some are preempted while guesses are checked
        {"enable_prefix_caching": False, "page_size": 1, "num_pages": 250},
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_guessing_changes_no_token(seed, limits):
    seqs = some_sequences(seed=seed)
    guessed = run_all(seqs, **limits)
    assert len(guessed) > 5
    for seq in seqs:
        assert outcome(seq) == generate_alone(seq.request, 160, pick_again)


def test_preemption_is_met_while_guesses_are_checked():
    scheduler = make_scheduler(num_pages=18, max_num_seqs=3, speculation=SPECULATION)
    run_all(some_sequences(), scheduler=scheduler)
    assert scheduler.num_preemptions


def test_a_sequence_ends_at_a_stop_token_inside_a_draft():
    params = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=[9])
    seq = make_sequence(0, [1, 2, 3, 4] * 4, 60, params=params)
    ring = {1: 2, 2: 3, 3: 4, 4: 1}

    def ring_then_stop(prefix, *edits):
        return 9 if len(prefix) == 38 else ring.get(prefix[-1], 1)

    guessed = run_all([seq], pick=ring_then_stop)
    assert guessed
    assert outcome(seq) == ([1, 2, 3, 4] * 5 + [1, 2, 9], "stop", 9)


def test_a_text_that_repeats_takes_few_steps_and_one_that_does_not_takes_no_guess():
    seq = make_sequence(0, [1, 2, 3, 4] * 4, 60)
    scheduler = make_scheduler(num_pages=81, speculation=SPECULATION, max_model_len=160)
    loop = Loop(scheduler)
    loop.device.pick = lambda prefix, *edits: prefix[-4]
    loop.run([seq])
    assert seq.output_token_ids == [1, 2, 3, 4] * 15
    assert loop.num_steps < 2 * 60 / 4 + 12  # of two calls that plan one finds the row in flight
    assert not run_all(some_sequences(), pick=pick)


def ring_sequences(count, max_tokens=40, **fields):
    return [make_sequence(i, [1, 2, 3, 4] * 4, max_tokens, **fields) for i in range(count)]


def follow_ring(prefix, *edits):
    return prefix[-4]


def test_nothing_is_guessed_beside_a_row_whose_logits_are_edited():
    params = SamplingParams(temperature=0.0, max_tokens=60, presence_penalty=0.5)
    beside = make_sequence(9, [7, 8, 9, 10], 60, params=params, eos_token_ids=frozenset())
    assert not run_all([beside, *ring_sequences(2)], pick=follow_ring)
    assert run_all(ring_sequences(2), pick=follow_ring)


def test_with_many_rows_nothing_is_guessed_and_no_row_waits_for_the_host():
    num_rows = MAX_DRAFT_ROWS + 1
    scheduler = make_scheduler(
        num_pages=600, max_num_seqs=num_rows, max_num_batched_tokens=1024, speculation=SPECULATION
    )
    first, *others = ring_sequences(num_rows)
    loop = Loop(scheduler)
    loop.device.pick = follow_ring
    scheduler.add(first)
    while not first.needs_read_tokens:
        loop.step()
    for seq in others:
        scheduler.add(seq)
    while scheduler.num_running < num_rows:
        loop.step()
    loop.step()
    assert not first.needs_read_tokens
    loop.run()
    assert all(seq.output_token_ids == [1, 2, 3, 4] * 10 for seq in (first, *others))


@pytest.mark.parametrize(("num_rows", "most"), [(1, 31), (16, 15)])
def test_rows_guess_the_fewer_tokens_the_more_they_are(num_rows, most):
    limits = {"num_pages": 600, "max_num_batched_tokens": 2048, "max_num_seqs": num_rows}
    speculation = Speculation("ngram", 31, 3, 1)
    seqs = ring_sequences(num_rows, 120)
    guessed = run_all(seqs, pick=follow_ring, speculation=speculation, **limits)
    assert max(map(len, guessed)) == most
    assert num_rows * (1 + most) <= MAX_DRAFT_TOKENS


def copy_of(prompt, changes=()):
    """Goes on with the prompt from its beginning, with other tokens at some places."""

    def copy(prefix, *edits):
        place = len(prefix) - len(prompt)
        return dict(changes).get(place, prompt[place % len(prompt)])

    return copy


@pytest.mark.parametrize(
    ("lookup", "num_different", "changes"),
    [((3, 2), 3, {}), ((4, 4), 30, {16: 35, 25: 36, 34: 35, 43: 36})],
    ids=["short runs stand in many places", "a token differs here and there"],
)
def test_a_copy_is_followed_where_looking_up_the_last_tokens_finds_nothing_or_elsewhere(
    lookup, num_different, changes
):
    prompt = np.random.default_rng(3).integers(6, 6 + num_different, 60).tolist()
    seq, speculation = make_sequence(0, prompt, 60), Speculation("ngram", 3, *lookup)
    guessed = run_all([seq], pick=copy_of(prompt, changes), speculation=speculation)
    assert seq.output_token_ids == [changes.get(i, token) for i, token in enumerate(prompt)]
    assert 13 < len(guessed) < 18  # of 3 tokens each


def test_a_run_with_guesses_is_replayed_to_the_same_plans(tmp_path):
    file = tmp_path / "run.jsonl"
    inner = make_scheduler(num_pages=81, speculation=SPECULATION, max_model_len=160)
    guessed = run_all(some_sequences(), scheduler=RecordedScheduler(inner, file))
    assert guessed
    assert replay(file).mismatch is None


def length_of(rate, num_rows, most=5, guess_cost=0.0):
    (length, *_) = best_lengths([rate] * num_rows, [1.2] * num_rows, most, guess_cost, 1.0)
    return length


def test_drafts_grow_with_the_rate_of_right_guesses_and_end_with_many_rows():
    lengths = [length_of(rate, 1) for rate in (0.0, 0.3, 0.5, 0.8, 1.0)]
    assert lengths[0] == lengths[1] == 0
    assert lengths == sorted(lengths)
    assert lengths[-1] == 5
    assert length_of(1.0, 512) == 0
    assert length_of(0.5, 16) <= length_of(0.5, 1)


def test_one_that_copies_drafts_beside_others_unless_their_steps_then_take_longer():
    rates = [1.0, *[0.0] * 7]
    assert best_lengths(rates, [1.2] * 8, 5, 0.0, 1.0) == [5, *[0] * 7]
    assert best_lengths(rates, [1.2] * 8, 5, 0.0, 2.0) == [0] * 8
    assert best_lengths([1.0], [1.2], 5, 0.0, 2.0) == [5]


@pytest.mark.parametrize(
    ("drafted", "sampled", "right"),
    [((1, 2), (1, 2, 3), 2), ((1, 2), (1, 9, 3), 1), ((1, 2), (9, 2, 3), 0), ((), (1,), 0)],
)
def test_guesses_count_up_to_the_first_wrong_one(drafted, sampled, right):
    assert count_right(drafted, sampled) == right


def test_limits_without_speculation_guess_nothing():
    assert make_limits().speculation is None
    assert not run_all(some_sequences(), speculation=None)


DRAFTING = Speculation("draft_model", 3, model="small")


def guesser(seed, good):
    """A draft model that is right now and then."""
    random = np.random.default_rng(seed)

    def guess(seq, length):
        tokens = list(seq.token_ids)
        for _ in range(length):
            right = pick_again(tokens, (), np.arange(VOCAB), 0.0, ())
            tokens.append(right if random.random() < good else int(random.integers(VOCAB)))
        return tuple(tokens[-length:])

    return guess


@pytest.mark.parametrize("limits", [{}, {"num_pages": 22, "max_num_seqs": 3}])
@pytest.mark.parametrize("good", [1.0, 0.8, 0.0])
def test_what_a_draft_model_guesses_changes_no_token(tmp_path, good, limits):
    sizes = {"num_pages": 81, "max_model_len": 160, "draft_cost": 0.05} | limits
    inner = make_scheduler(speculation=DRAFTING, **sizes)
    seqs, file = some_sequences(), tmp_path / "run.jsonl"
    guessed = run_all(seqs, scheduler=RecordedScheduler(inner, file), guess=guesser(1, good))
    assert guessed
    for seq in seqs:
        assert outcome(seq) == generate_alone(seq.request, 160, pick_again)
    assert replay(file).mismatch is None  # a plan has no guess, only how many there are


def test_a_draft_model_that_is_often_wrong_is_asked_less_and_tried_again_later():
    def num_guessed(good, max_tokens=60):
        seq = make_sequence(0, [7, 8, 9], max_tokens, eos_token_ids=frozenset())
        limits = {"max_model_len": 1024, "num_pages": 300, "draft_cost": 0.05}
        return len(run_all([seq], speculation=DRAFTING, guess=guesser(2, good), **limits))

    assert 0 < num_guessed(0.0) < 8
    assert num_guessed(1.0) > 12
    assert num_guessed(0.0, 400) > num_guessed(0.0)


def test_guessing_that_costs_much_is_done_less():
    lengths = [length_of(0.7, 1, 8, cost) for cost in (0.0, 0.1, 0.2, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[3] == 0


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=34),
    num_prompt=st.integers(1, 34),
    lengths=st.sampled_from([(1, 1), (2, 4), (3, 3)]),
    most=st.integers(1, 34),
)
def test_a_text_is_known_alike_however_much_is_read_at_once(ids, num_prompt, lengths, most):
    seq = make_sequence(0, ids[:num_prompt])
    text, one_by_one = _Text(seq, *lengths), _Text(seq, *lengths)
    seq.token_ids += ids[num_prompt:]
    while not text.read(most):
        pass
    while not one_by_one.read(1):
        pass
    assert text.continuation(5) == one_by_one.continuation(5)
    assert text.rate == pytest.approx(one_by_one.rate)


def longest_before(ids, shortest, longest):
    """After the last place of the longest run that the text ends with, found the slow way."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if length <= len(ids) and ids[place - length : place] == ids[-length:]:
                return place
    return -1


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=34),
    lengths=st.sampled_from([(1, 1), (2, 4), (3, 3)]),
)
def test_a_text_goes_on_as_after_its_longest_run_that_stood_before(ids, lengths):
    seq = make_sequence(0, ids)
    text = _Text(seq, *lengths)
    text.read(len(ids))
    assert text.guess == longest_before(ids, *lengths)


def test_no_step_looks_through_many_texts_at_once(monkeypatch):
    monkeypatch.setattr(speculator, "TOKENS_A_STEP", 12)
    scheduler = make_scheduler(num_pages=81, speculation=SPECULATION, max_model_len=160)
    texts, most = scheduler._speculator._texts, 0
    for seq in some_sequences(4):
        scheduler.add(seq)
    for token in range(100, 160):  # none comes twice: nothing is guessed
        before = sum([text.num_seen for text in texts.values()])
        commit(scheduler, scheduler.schedule(), token)
        most = max(most, sum([text.num_seen for text in texts.values()]) - before)
    assert 0 < most <= 12


def test_texts_that_have_ended_are_not_kept_while_others_run():
    scheduler = make_scheduler(num_pages=81, speculation=SPECULATION, max_model_len=160)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    long = make_sequence(0, [1, 2] * 4, 120, params=params)
    short = [make_sequence(i, [1, 2] * 4, 3) for i in range(1, 4)]
    kept = scheduler._speculator._texts
    loop = Loop(scheduler)
    for seq in (long, *short):
        scheduler.add(seq)
    most = 0
    while not all(seq.finish_reason for seq in short) or loop.num_steps < 20:
        loop.step()
        most = max(most, len(kept))
    assert (most, list(kept)) == (4, [0])
