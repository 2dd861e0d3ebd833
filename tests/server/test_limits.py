"""A key's own limits: 429 with the time to wait, and no effect on other keys."""

import pytest

from jaxpaged.errors import RateLimited
from server.limits import KeyLimits
from server.state import ServerLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_come_back_steadily():
    clock = Clock()
    limits = KeyLimits(3, None, clock)
    for _ in range(3):
        limits.admit("a")
    with pytest.raises(RateLimited, match="3 requests a minute") as caught:
        limits.admit("a")
    assert caught.value.retry_after_s == pytest.approx(20)
    limits.admit("b")
    clock.now += 20
    limits.admit("a")
    with pytest.raises(RateLimited):
        limits.admit("a")
    clock.now += 3600
    for _ in range(3):
        limits.admit("a")


def test_tokens_are_paid_afterwards_and_may_be_overdrawn():
    clock = Clock()
    limits = KeyLimits(None, 100, clock)
    limits.admit("a")
    limits.charge("a", 150)
    assert limits.headers("a")["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited, match="100 tokens a minute") as caught:
        limits.admit("a")
    clock.now += caught.value.retry_after_s + 0.001
    limits.admit("a")


def test_without_limits_there_are_no_headers():
    limits = KeyLimits(None, None)
    for _ in range(1000):
        limits.admit("a")
    assert limits.headers("a") == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_over_its_limit_gets_a_429(start, stream):
    limits = ServerLimits(requests_per_minute=2)
    server = await start(api_keys=("one", "two"), limits=limits)
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
