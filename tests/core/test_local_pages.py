import pytest

from jaxpaged.core.local_pages import LocalPages, most_of_decode
from jaxpaged.core.page_pool import PagePool
from jaxpaged.errors import InvariantError, RequestError
from tests.core.fake_device import add, commit, make_scheduler, make_sequence, prompt


def scheduler_with_windows(window=6, num_local_pages=9, **options):
    return make_scheduler(window=window, num_local_pages=num_local_pages, **options)


def held(seq):
    return len(seq.page_ids) - seq.first_local_page


def test_an_answer_of_32k_tokens_holds_the_local_pages_of_its_window():
    sizes = {"page_size": 16, "max_model_len": 34_000, "max_num_batched_tokens": 2048}
    scheduler = scheduler_with_windows(512, 200, num_pages=2200, **sizes)
    (seq,) = add(scheduler, make_sequence(0, range(1000), 32_768))
    most, local = 0, scheduler.local
    while scheduler.has_work:
        commit(scheduler, scheduler.schedule())
        if scheduler.has_work and seq.num_output_tokens > 1:
            most = max(most, local.pool.num_held)
    assert seq.num_output_tokens == 32_768
    assert most <= 512 // 16 + 2
    scheduler.check()


def test_local_pages_of_known_tokens_stay_findable_until_they_are_taken():
    scheduler = scheduler_with_windows(num_pages=33, max_num_batched_tokens=64)
    first, second = make_sequence(0, prompt(10, 20), 1), make_sequence(1, prompt(10, 20), 1)
    for seq, num_cached in ((first, 0), (second, 16)):
        add(scheduler, seq)
        while scheduler.has_work:
            commit(scheduler, scheduler.schedule())
        assert seq.num_cached_tokens == num_cached
        scheduler.check()
    assert scheduler.local.pool.num_held == 0


def test_a_hit_ends_where_a_whole_window_is_there():
    pool = PagePool(20, 4)
    local = LocalPages(pool, 6, 12)
    page_ids = pool.take(5)
    assert local.usable(page_ids) == page_ids
    local.release(page_ids[:1])  # no longer needed by a next token at 20, 16 or 12
    assert local.usable(page_ids) == page_ids
    local.release(page_ids[3:4])  # the last page's window begins in the one before
    assert local.usable(page_ids) == page_ids[:3]
    local.release(page_ids[1:3])
    assert local.usable(page_ids) == []


def test_a_prompt_is_cut_so_that_its_chunks_find_local_pages():
    scheduler = scheduler_with_windows(
        num_local_pages=1 + 5, num_pages=33, max_num_batched_tokens=64
    )
    (seq,) = add(scheduler, make_sequence(0, prompt(10, 50), 3))
    chunks = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        chunks += plan.columns.q_lens
        assert held(seq) <= 5
        commit(scheduler, plan)
    assert sum(chunks) == 52
    assert max(chunks) == 4 * (5 - most_of_decode(6, 4))


def test_admission_counts_the_window_and_not_the_prompt():
    sizes = {"num_pages": 60, "max_num_batched_tokens": 8, "reserve_full_prompt": True}
    scheduler = scheduler_with_windows(num_local_pages=1 + 12, **sizes)
    assert scheduler.local.most_of_one == 12
    scheduler.local.most_of_one = 5
    seqs = add(scheduler, *(make_sequence(i, prompt(10 * i, 40), 20) for i in range(3)))
    commit(scheduler, scheduler.schedule())
    commit(scheduler, scheduler.schedule())
    assert [bool(seq.page_ids) for seq in seqs] == [True, False, False]
    for _ in range(6):
        commit(scheduler, scheduler.schedule())
    assert [bool(seq.page_ids) for seq in seqs] == [True, True, False]
    scheduler.check()


def test_what_no_pool_of_local_pages_could_hold_is_refused():
    scheduler = scheduler_with_windows(window=30, num_local_pages=6, num_pages=33)
    with pytest.raises(RequestError, match="10 local pages of 4 tokens, the pool has 5"):
        add(scheduler, make_sequence(0, prompt(10, 40), 3))
    add(scheduler, make_sequence(1, prompt(10, 10), 3))


def test_a_local_page_that_is_lost_is_noticed():
    scheduler = scheduler_with_windows()
    (seq,) = add(scheduler, make_sequence(0, prompt(10, 10), 3))
    commit(scheduler, scheduler.schedule())
    scheduler.check()
    scheduler.local.pool.give_back(scheduler.local.ids(seq.page_ids[-1:]))
    with pytest.raises(InvariantError, match="holders"):
        scheduler.check()
