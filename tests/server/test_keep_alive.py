"""--sse-keep-alive-interval: a stream that has nothing to tell yet is never silent for long."""

import threading

import msgspec
import pytest

from server.sse import KEEP_ALIVE
from server.state import ServerLimits
from tests.server.conftest import COMPLETIONS

LIMITS = ServerLimits(sse_keep_alive_s=0.1)
ASKED = {
    "plain": (COMPLETIONS, {"prompt": "ABC"}),
    "with more": (COMPLETIONS, {"prompt": "ABC", "logprobs": 1}),
    "response": ("/v1/responses", {"input": "ABC"}),
    "in background": ("/v1/responses", {"input": "ABC", "background": True}),
}


@pytest.fixture
async def held(start):
    """A server whose first step waits for `go`."""
    server = await start(limits=LIMITS)
    server.go = threading.Event()
    server.engine.before_step = lambda step: server.go.wait(10) if step == 1 else None
    yield server
    server.go.set()


@pytest.mark.parametrize("kind", ASKED)
async def test_comments_come_before_the_first_token_and_change_nothing(held, kind):
    path, body = ASKED[kind]
    body = {"stream": True, "max_tokens": 3, "max_output_tokens": 3, "temperature": 0} | body
    async with held.session.post(held.url + path, json=body) as response:
        head = await response.content.readuntil(KEEP_ALIVE)
        head += await response.content.readuntil(KEEP_ALIVE)
        held.go.set()
        rest = await response.content.read()
    pieces = [piece for piece in (head + rest).split(b"\n\n") if piece]
    assert pieces.count(KEEP_ALIVE.strip()) >= 2
    events = [msgspec.json.decode(p.partition(b"data: ")[2]) for p in pieces if b"data: {" in p]
    texts = [e["choices"][0]["text"] if "choices" in e else e.get("delta", "") for e in events]
    assert "".join(texts) == "DEF"


async def test_an_error_before_the_first_token_is_told_in_a_stream_that_was_kept_alive(held):
    body = {"prompt": "ABC", "stream": True, "timeout_s": 0.3}
    reply = await held.post(body)
    assert reply.status == 200
    assert reply.raw.startswith(KEEP_ALIVE)
    (error,) = [e for e in reply.raw.split(b"\n\n") if b'"timeout_error"' in e]
    assert error.startswith(b"data: ")
    assert reply.raw.endswith(b"[DONE]\n\n")


async def test_without_the_flag_an_error_before_the_first_token_has_its_status(start):
    server, go = await start(), threading.Event()
    server.engine.before_step = lambda step: go.wait(10) if step == 1 else None
    reply = await server.post({"prompt": "ABC", "stream": True, "timeout_s": 0.3})
    go.set()
    assert (reply.status, reply.error["type"]) == (408, "timeout_error")
