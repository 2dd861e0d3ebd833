"""A key's own limits: 429 with the time to wait, and no effect on other keys."""

import pytest

from jaxpaged.errors import RateLimited
from server.auth import parse_key_line
from server.limits import NO_LIMITS, Limits, RateLimits
from server.state import ServerLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_come_back_steadily():
    clock = Clock()
    limits, own = RateLimits(NO_LIMITS, clock), Limits(3, None)
    for _ in range(3):
        limits.admit("a", own)
    with pytest.raises(RateLimited, match="this key is 3 requests a minute") as caught:
        limits.admit("a", own)
    assert caught.value.retry_after_s == pytest.approx(20)
    limits.admit("b", own)
    clock.now += 20
    limits.admit("a", own)
    with pytest.raises(RateLimited):
        limits.admit("a", own)
    clock.now += 3600
    for _ in range(3):
        limits.admit("a", own)


def test_the_servers_limit_counts_all_keys_together():
    limits = RateLimits(Limits(3, None), Clock())
    for key in ("a", "b", "c"):
        limits.admit(key, Limits(2, None))
    assert limits.headers("a", Limits(2, None))["x-ratelimit-limit-requests"] == "3"
    with pytest.raises(RateLimited, match="server's limit is 3 requests"):
        limits.admit("d")


def test_a_refused_request_pays_nothing():
    limits, own = RateLimits(Limits(10, None), Clock()), Limits(1, None)
    limits.admit("a", own)
    for _ in range(20):
        with pytest.raises(RateLimited, match="this key"):
            limits.admit("a", own)
    assert limits.headers()["x-ratelimit-remaining-requests"] == "9"


def test_tokens_are_paid_afterwards_and_may_be_overdrawn():
    clock = Clock()
    limits, own = RateLimits(NO_LIMITS, clock), Limits(None, 100)
    limits.admit("a", own)
    limits.charge(150, "a", own)
    assert limits.headers("a", own)["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited, match="100 tokens a minute") as caught:
        limits.admit("a", own)
    clock.now += caught.value.retry_after_s + 0.001
    limits.admit("a", own)


def test_of_several_limits_the_one_that_takes_longest_is_told():
    clock = Clock()
    limits, own = RateLimits(Limits(2, None), clock), Limits(1, 100)
    limits.admit("a", own)
    limits.charge(300, "a", own)
    with pytest.raises(RateLimited, match="this key is 100 tokens a minute") as caught:
        limits.admit("a", own)
    clock.now += caught.value.retry_after_s + 0.001
    limits.admit("a", own)


def test_without_limits_there_are_no_headers():
    limits = RateLimits(NO_LIMITS)
    for _ in range(1000):
        limits.admit("a")
    assert limits.headers("a") == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_over_its_limit_gets_a_429(start, stream):
    keys = tuple(parse_key_line(f"{k}:{k}:user:requests=2", "x") for k in ("one", "two"))
    server = await start(api_keys=keys)
    body = {"prompt": "ABC", "max_tokens": 2, "stream": stream}
    first, second = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    replies = [await server.post(body, headers=first) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert replies[2].error["type"] == "rate_limit_error"
    assert int(replies[2].headers["retry-after"]) >= 1
    assert (await server.post(body, headers=second)).status == 200
    assert (await server.get("/v1/models", headers=first)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_count(start, stream):
    server = await start(limits=ServerLimits(tokens_per_minute=8))
    body = {"prompt": "ABC", "max_tokens": 5, "stream": stream}
    assert (await server.post(body)).status == 200
    reply = await server.post(body)
    assert (reply.status, reply.error["type"]) == (429, "rate_limit_error")
