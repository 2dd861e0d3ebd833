"""Requests go where their beginning is, and to whoever has least to do."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.router import MATCH_ROWS, Router, prefixes_of, weight_of

PAGE = 4


def prompt(beginning: int, length: int = 3 * PAGE) -> list[int]:
    return [beginning] * length


def send(router: Router, token_ids: list[int], salt: str = "", among=(0, 1)) -> int:
    prefixes = prefixes_of(token_ids, PAGE, salt)
    replica = router.choose(prefixes, among)
    router.sent(replica, prefixes, 1.0)
    return replica


def test_new_beginnings_spread_and_known_ones_return():
    router = Router(2)
    homes = {start: send(router, prompt(start)) for start in range(4)}
    assert sorted(homes.values()) == [0, 0, 1, 1]
    for start, home in homes.items():
        assert send(router, [*prompt(start), 7, 8, 9]) == home


def test_a_beginning_is_left_once_its_replica_has_much_more_to_do():
    router = Router(2)
    home = send(router, prompt(1))
    others = [send(router, prompt(1)) for _ in range(MATCH_ROWS + 2)]
    assert others[:MATCH_ROWS] == [home] * MATCH_ROWS
    assert others[-1] != home


def test_a_long_beginning_is_worth_more_than_a_short_one():
    router, long = Router(2), prompt(1, 4096)
    home = send(router, long)
    router.loads[home] += 15
    assert send(router, long) == home
    router.loads[home] += 15
    assert send(router, long) != home


def test_salts_do_not_share_a_beginning():
    assert not set(prefixes_of(prompt(1), PAGE, "a")) & set(prefixes_of(prompt(1), PAGE, "b"))


def test_a_replica_whose_cache_is_empty_has_no_beginnings():
    router = Router(2)
    home = send(router, prompt(1))
    router.ended(home, 1.0)
    router.forget(home)
    assert len(router) == 0
    assert send(router, prompt(1)) != home  # the other was sent fewer


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60))
def test_memory_is_bounded_and_loads_return_to_zero(sent):
    router, open_ones = Router(3, most_prefixes=8), []
    for beginning, length in sent:
        prefixes = prefixes_of(prompt(beginning, length), PAGE, "")
        replica = router.choose(prefixes, (0, 2))
        weight = weight_of(length, 1)
        router.sent(replica, prefixes, weight)
        open_ones.append((replica, weight))
        assert replica != 1
        assert len(router) <= 8
    for replica, weight in open_ones:
        router.ended(replica, weight)
    assert all(abs(load) < 1e-9 for load in router.loads)
