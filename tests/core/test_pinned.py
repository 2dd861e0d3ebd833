"""Warm prefixes: who finds them, and that they stay."""

import dataclasses

import pytest

from jaxpaged.core.cached_page import SHARED_SALT
from jaxpaged.core.request import Pin
from jaxpaged.errors import RequestError
from tests.core.fake_device import Loop, add, make_scheduler, make_sequence, prompt, shares


def warm(loop, tokens, name="warm", **request):
    loop.run([make_sequence(90, tokens, 0, pin=Pin(name), **request)])
    return loop.scheduler.pinned.get(name)


def evict_all(scheduler):
    """Fill the pool with other sequences, so that what is not held goes."""
    pool = scheduler.pool
    pool.give_back(pool.take(pool.num_free))
    scheduler.check()


@pytest.mark.parametrize(("num_tokens", "num_found"), [(7, 4), (8, 8), (9, 8)])
def test_full_pages_of_a_warm_prefix_outlive_everything(num_tokens, num_found):
    loop = Loop(make_scheduler(num_pages=40))
    scheduler = loop.scheduler
    prefix = warm(loop, prompt(0, num_tokens))
    assert prefix is not None
    assert prefix.num_tokens == num_found
    evict_all(scheduler)
    add(scheduler, make_sequence(0, prompt(0, 12)))
    assert shares(scheduler.schedule()) == [(0, num_found, 12 - num_found)]


def test_warming_twice_holds_the_pages_once_and_dropping_lets_them_go():
    loop = Loop(make_scheduler(num_pages=40))
    scheduler = loop.scheduler
    first = warm(loop, prompt(0, 8))
    assert warm(loop, prompt(0, 8)) == first
    assert scheduler.pool.num_held == 2
    assert scheduler.pinned.drop("warm")
    assert not scheduler.pinned.drop("warm")
    assert (scheduler.pool.num_held, scheduler.pool.num_cached) == (0, 2)
    evict_all(scheduler)
    assert len(scheduler.cache) == 0


def test_a_reset_forgets_warm_prefixes_too():
    loop = Loop(make_scheduler(num_pages=40))
    scheduler = loop.scheduler
    warm(loop, prompt(0, 8))
    scheduler.reset_prefix_cache()
    scheduler.check()
    assert (list(scheduler.pinned), scheduler.pool.num_held, len(scheduler.cache)) == ([], 0, 0)


def test_a_prefix_belongs_to_its_salt_and_adapter():
    loop = Loop(make_scheduler(num_pages=40))
    scheduler = loop.scheduler
    warm(loop, prompt(0, 8), cache_salt="a", adapter_id="x")
    seqs = [
        make_sequence(i, prompt(0, 9), cache_salt=salt, adapter_id=adapter)
        for i, (salt, adapter) in enumerate([("b", "x"), ("a", ""), ("ax", ""), ("a", "x")])
    ]
    for seq in seqs:
        add(scheduler, seq)
        scheduler.schedule()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0, 8]


@pytest.mark.parametrize("hash_bits", [256, 4])
def test_what_follows_a_prefix_shared_by_all_stays_with_its_salt(hash_bits):
    loop = Loop(make_scheduler(num_pages=60, hash_bits=hash_bits))
    warm(loop, prompt(0, 8), cache_salt=SHARED_SALT)
    loop.run([make_sequence(0, prompt(0, 16), cache_salt="a")])
    found = {}
    for i, salt in enumerate("abc"):
        seq = make_sequence(1 + i, prompt(0, 17), cache_salt=salt)
        loop.run([seq])
        found[salt] = seq.num_cached_tokens
    assert found == {"a": 16, "b": 8, "c": 8}


def test_pins_leave_room_for_the_longest_sequence():
    loop = Loop(make_scheduler(num_pages=1 + 16 + 3, max_model_len=64))
    scheduler = loop.scheduler
    warm(loop, prompt(0, 8))
    with pytest.raises(RequestError, match="pins 2 full pages of 4 tokens, allowed are 1 to 1"):
        add(scheduler, make_sequence(1, prompt(20, 8), 0, pin=Pin("other")))
    with pytest.raises(RequestError, match=r"3 tokens fills no page .*: send 4 tokens or"):
        add(scheduler, make_sequence(1, prompt(20, 3), 0, pin=Pin("other")))
    longest = make_sequence(2, prompt(0, 60), 4)
    loop.run([longest])
    assert longest.finish_reason in ("length", "stop")


def test_two_that_are_warmed_at_once_pin_no_more_than_there_is_room_for():
    loop = Loop(make_scheduler(num_pages=1 + 16 + 3, max_model_len=64))
    scheduler = loop.scheduler
    for i in range(2):
        add(scheduler, make_sequence(i, prompt(20 * i, 8), 0, pin=Pin(str(i))))
    loop.run()
    assert [dataclasses.astuple(p)[2] for p in scheduler.pinned] == [8]


def test_without_a_prefix_cache_nothing_is_warmed():
    scheduler = make_scheduler(num_pages=40, enable_prefix_caching=False)
    with pytest.raises(RequestError, match="switched off"):
        add(scheduler, make_sequence(0, prompt(0, 8), 0, pin=Pin("warm")))


@pytest.mark.parametrize("begins", [0, 500])
def test_a_prefix_shared_by_all_is_looked_for_no_further_than_it_is_found(begins, monkeypatch):
    loop = Loop(make_scheduler(num_pages=200, max_model_len=300, max_num_batched_tokens=300))
    warm(loop, prompt(begins, 8), cache_salt=SHARED_SALT)
    loop.run([make_sequence(0, prompt(0, 200), 1, cache_salt="a")])
    cache, looked = loop.scheduler.cache, []
    one = cache._entry_at
    monkeypatch.setattr(cache, "_entry_at", lambda *args: looked.append(args[1]) or one(*args))
    seq = make_sequence(1, prompt(0, 201), 1, cache_salt="a")
    assert len(cache.find(seq)) == 50
    assert looked == ([0, 1] if begins == 0 else [0])
    assert len(seq.shared_hashes) == (2 if begins == 0 else 1)
