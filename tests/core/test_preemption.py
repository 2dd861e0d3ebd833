import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.sequence import SeqState
from jaxpaged.errors import InvariantError
from tests.core.fake_device import EOS, add, commit, make_scheduler, make_sequence, prompt, shares


def crowd(params=None):
    """Three sequences of 7 tokens on 6 pages: all are full, each soon wants a third page."""
    scheduler = make_scheduler(num_pages=7, max_num_batched_tokens=32)
    seqs = (make_sequence(i, prompt(20 * i, 7), 12, params=params) for i in range(3))
    seqs = add(scheduler, *seqs)
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [row.q_len for row in plans[1].rows] == [1, 1, 1]
    commit(scheduler, plans[0])
    return scheduler, seqs, plans


def test_the_youngest_gives_way_and_is_the_next_to_come_back():
    scheduler, seqs, plans = crowd()
    late = make_sequence(3, [90])
    add(scheduler, late)
    plan = scheduler.schedule()
    assert shares(plan) == [(0, 8, 1), (1, 8, 1)]
    assert (scheduler.num_preemptions, seqs[2].num_preemptions) == (1, 1)
    assert (seqs[2].state, seqs[2].page_ids, seqs[2].slot) == (SeqState.WAITING, [], None)
    assert list(scheduler._waiting) == [seqs[2], late]
    scheduler.check()
    # its token in flight is kept; until it is read, it is not admitted
    scheduler.abort(seqs[0])
    assert shares(scheduler.schedule()) == [(1, 9, 1)]
    commit(scheduler, plans[1], 11)
    assert seqs[2].output_token_ids == [9, 11]
    assert seqs[2].num_in_flight == 0
    assert shares(scheduler.schedule()) == [(1, 10, 1), (2, 0, 9)]


def test_a_preempted_sequence_may_finish_with_its_token_in_flight():
    scheduler, seqs, plans = crowd()
    scheduler.schedule()
    assert seqs[2].state is SeqState.WAITING
    commit(scheduler, plans[1], EOS)
    assert (seqs[2].finish_reason, scheduler.num_waiting) == ("stop", 0)
    scheduler.check()


def crowd_of_chunks():
    """An old sequence that decodes in its third step and then takes a young one's pages, whose
    prompt is not done: nothing of it is in flight but its KV."""
    scheduler = make_scheduler(num_pages=5, long_prefill_token_threshold=4)
    seqs = add(scheduler, make_sequence(0, prompt(0, 8), 8), make_sequence(1, prompt(20, 12), 2))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [shares(plan)[1:] for plan in plans] == [[(1, 0, 4)], [(1, 4, 4)], []]
    assert seqs[1].num_preemptions == 1
    return scheduler, seqs, plans


def test_nobody_is_admitted_in_the_step_that_preempts():
    scheduler, _, plans = crowd_of_chunks()
    assert shares(plans[2]) == [(0, 8, 1)]
    assert scheduler.pool.num_free == 1


def test_a_preempted_sequence_finds_its_own_pages_again():
    scheduler, (_, young), _ = crowd_of_chunks()
    assert shares(scheduler.schedule()) == [(0, 9, 1)]  # its page is there, the next one is not
    scheduler.abort(next(iter(scheduler._running.values())))
    assert shares(scheduler.schedule()) == [(1, 4, 4)]
    assert (young.num_cached_tokens, scheduler.cache.num_hit_tokens) == (0, 0)


def test_an_old_step_registers_nothing_for_a_sequence_that_began_again():
    scheduler, (old, young), plans = crowd_of_chunks()
    scheduler.cache.reset()
    scheduler.abort(old)
    scheduler.schedule()
    assert young.num_registered_pages == 1
    for plan in plans:
        commit(scheduler, plan)
    assert young.num_registered_pages == len(scheduler.cache) == 1
    scheduler.check()


def test_a_slot_with_penalties_is_reset_with_what_was_sampled_so_far():
    params = SamplingParams(max_tokens=12, presence_penalty=1.0)
    scheduler, seqs, plans = crowd(params)
    assert plans[0].slot_resets[2] == (2, tuple(range(40, 47)), 7)
    assert plans[1].slot_resets == ()
    scheduler.schedule()
    commit(scheduler, plans[1], 11)
    scheduler.abort(seqs[0])
    assert scheduler.schedule().slot_resets == ((0, (*range(40, 47), 9, 11), 7),)


def test_a_slot_without_penalties_is_not_reset():
    _, _, plans = crowd()
    assert plans[0].slot_resets == ()


def test_check_finds_a_slot_that_is_used_and_free():
    scheduler, _, _ = crowd()
    scheduler.check()
    scheduler._free_slots.append(0)
    with pytest.raises(InvariantError, match="slots"):
        scheduler.check()
