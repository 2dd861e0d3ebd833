import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.core.page_pool import PagePool
from jaxpaged.errors import InvariantError

NUM_PAGES = 9


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and give back at random; a plain model says who holds and who is kept."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES, page_size=4)
        self.pool.on_evict = self.evicted
        self.holders: list[list[int]] = []
        self.kept: set[int] = set()
        self.free_since: list[int] = []  # kept and free, oldest first

    def evicted(self, page_id):
        assert page_id == self.free_since.pop(0), "the oldest cached page goes first"
        self.kept.remove(page_id)

    @rule(num_pages=st.integers(0, 5))
    def take(self, num_pages):
        if num_pages > self.pool.num_free:
            with pytest.raises(InvariantError, match=f"{num_pages} pages wanted"):
                self.pool.take(num_pages)
            return
        num_blank = self.pool.num_free - self.pool.num_cached
        num_kept = len(self.kept)
        pages = self.pool.take(num_pages)
        assert len(set(pages)) == num_pages
        assert not self.held() & set(pages), "a page that somebody holds was handed out"
        assert num_kept - len(self.kept) == max(num_pages - num_blank, 0), "blank pages go first"
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.holders))
        num = data.draw(st.integers(0, len(pages)))
        self.pool.share(pages[:num])
        self.holders.append(list(pages[:num]))

    @precondition(lambda self: self.free_since)
    @rule(data=st.data())
    def revive(self, data):
        page_id = data.draw(st.sampled_from(self.free_since))
        self.pool.share([page_id])
        self.free_since.remove(page_id)
        self.holders.append([page_id])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data):
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.give_back(pages)
        still_held = self.held()
        self.free_since += [p for p in reversed(pages) if p in self.kept and p not in still_held]

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def keep(self, data):
        page_id = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.keep(page_id)
        self.kept.add(page_id)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data):
        page_id = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.forget(page_id)
        self.kept.remove(page_id)
        if page_id in self.free_since:
            self.free_since.remove(page_id)

    @invariant()
    def adds_up(self):
        self.pool.check()
        self.pool.check_holders(self.holders)
        held = self.held()
        assert 0 not in held, "the null page is never handed out"
        assert self.pool.num_held == len(held)
        assert self.pool.num_free == NUM_PAGES - 1 - len(held)
        assert self.pool.num_cached == len(self.free_since)
        assert self.pool.usage == len(held) / (NUM_PAGES - 1)

    def held(self):
        return {page_id for pages in self.holders for page_id in pages}


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def kept_pages(pool, num_pages):
    pages = pool.take(num_pages)
    for page_id in pages:
        pool.keep(page_id)
    return pages


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool = PagePool(5, 4)
    evicted = []
    pool.on_evict = evicted.append
    pages = kept_pages(pool, 4)
    pool.give_back(pages)
    pool.take(4)
    assert evicted == pages[::-1]


def test_a_cached_page_that_is_shared_again_is_not_evicted():
    pool = PagePool(4, 4)
    first, second, third = kept_pages(pool, 3)
    pool.give_back([first, second, third])
    pool.share([second])
    assert second not in pool.take(2)
    assert pool.num_free == 0


def test_the_line_of_cached_pages_stays_short_and_in_order():
    pool = PagePool(6, 4)
    evicted = []
    pool.on_evict = evicted.append
    first, second, third, fourth, fifth = kept_pages(pool, 5)
    for pages in ([first], [second], [third, fourth], [fifth]):
        pool.give_back(pages)
    for _ in range(100):
        pool.share([second, fifth])
        pool.give_back([second, fifth])
        assert len(pool._line) + len(pool._looked_at) <= 3 * pool.num_pages
        pool.check()
    pool.take(5)
    assert evicted == [first, fourth, third, fifth, second]


@pytest.mark.parametrize("seed", range(10))
def test_long_runs_evict_in_order_and_look_at_little_at_once(seed, monkeypatch):
    draw, num_pages = random.Random(seed), 20 + 40 * (seed % 2)
    pool, free_since, holders, evicted = PagePool(num_pages, 4), {}, [], []
    pool.on_evict = evicted.append
    counts, looks = PagePool._counts, []
    monkeypatch.setattr(PagePool, "_counts", lambda *place: looks.append(0) or counts(*place))
    for _ in range(1500):
        chance = draw.random()
        if chance < 0.45 and pool.num_free:
            pages = pool.take(draw.randint(1, min(5, pool.num_free)))
            assert evicted == list(free_since)[: len(evicted)]
            for page_id in evicted:
                del free_since[page_id]
            evicted.clear()
            for page_id in pages:
                if draw.random() < 0.8:
                    pool.keep(page_id)
        elif chance < 0.65 and free_since:
            pages = draw.sample(list(free_since), draw.randint(1, len(free_since)))
            pool.share(pages)
            for page_id in pages:
                del free_since[page_id]
        elif holders:
            pages = holders.pop(draw.randrange(len(holders)))
            looks.clear()
            pool.give_back(pages)
            assert len(looks) <= 2 * len(pages)
            free = [page_id for page_id in reversed(pages) if not pool._num_holders[page_id]]
            free_since |= dict.fromkeys(filter(pool.is_kept, free))
            continue
        else:
            continue
        holders.append(pages)
    pool.check()


def test_sharing_a_blank_page_is_refused():
    pool = PagePool(4, 4)
    with pytest.raises(InvariantError, match="page 2 is blank"):
        pool.share([2])


def test_giving_back_twice_is_refused():
    pool = PagePool(4, 4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(InvariantError, match="nobody holds it"):
        pool.give_back(pages)


def test_keeping_a_free_page_is_refused():
    with pytest.raises(InvariantError, match="nobody holds it"):
        PagePool(4, 4).keep(1)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda pool: pool._blank.pop(), "is in 0 of"),
        (lambda pool: pool._blank.append(pool._blank[0]), "is in 2 of"),
        (lambda pool: pool._blank.append(0), "null page"),
        (lambda pool: pool._is_kept.__setitem__(pool._blank[0], 1), "is in 2 of"),
        (lambda pool: pool._line.pop(), "counted wrongly"),
        (lambda pool: setattr(pool, "_num_cached", 2), "counted wrongly"),
        (lambda pool: pool._num_holders.__setitem__(pool._blank[0], -1), "is in 2 of|fewer than 0"),
    ],
)
def test_check_finds_a_damaged_pool(damage, complaint):
    pool = PagePool(6, 4)
    pool.give_back(kept_pages(pool, 1))
    pool.take(2)
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError, match=complaint):
        pool.check()


def test_check_holders_finds_a_page_with_one_holder_too_many():
    pool = PagePool(6, 4)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.check_holders([pages, pages[:1]])
    with pytest.raises(InvariantError, match="counts 2 holders, 1 hold it"):
        pool.check_holders([pages])
