"""use_beam_search: the successor model's likeliest answers, over HTTP."""

import asyncio
import time

import pytest

from server.auth import ApiKey
from server.limits import Limits
from tests.server.conftest import CHAT
from tests.server.test_protocol import until

SEARCH = {"prompt": "ABC", "use_beam_search": True, "n": 3, "max_tokens": 3}
LONG = SEARCH | {"max_tokens": 1500}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_likeliest_answers_come_best_first(server, stream):
    reply = await server.post(SEARCH | {"stream": stream, "prompt": ["ABC", "bc"]})
    if stream:
        found = sorted((c["index"], c["text"]) for e in reply.events for c in e["choices"])
        texts = [text for _, text in found]
    else:
        assert reply.body["usage"] | {"prompt_tokens_details": None} == {
            "prompt_tokens": 5,
            "completion_tokens": 18,
            "total_tokens": 23,
            "prompt_tokens_details": None,
        }
        texts = [choice["text"] for choice in reply.body["choices"]]
        assert {choice["finish_reason"] for choice in reply.body["choices"]} == {"length"}
    assert (texts[0], texts[3]) == ("DEF", "def")
    assert len(set(texts)) == 6
    assert set(texts[:3]) <= {"DEF", "DEG", "DFG", "EFG"}
    assert not server.engine.has_work


async def test_a_conversation_may_be_searched_up_to_the_context(start):
    server = await start(max_len=12)
    body = {"messages": [{"role": "user", "content": "ABC"}], "use_beam_search": True, "n": 2}
    choices = (await server.post(body, CHAT)).body["choices"]
    assert choices[0]["message"]["content"] == "DEFGHIJKL"


async def test_a_client_that_leaves_ends_the_search(server):
    server.engine.before_step = lambda step: time.sleep(0.002)
    task = asyncio.create_task(server.post(LONG))
    await until(lambda: server.engine.num_steps > 3)
    task.cancel()
    await until(lambda: not server.engine.has_work and not server.llm.num_open_requests, 1.0)
    steps = server.engine.num_steps
    await asyncio.sleep(0.05)
    assert server.engine.num_steps - steps <= 1
    assert not server.state.open_ids


async def test_a_search_can_be_aborted_and_has_its_time(server):
    server.engine.before_step = lambda step: time.sleep(0.002)
    task = asyncio.create_task(server.post(LONG | {"request_id": "mine"}))
    await until(lambda: server.engine.num_steps > 3)
    await server.post({"request_ids": ["mine"]}, "/inference/v1/abort_requests")
    (first, *_) = (await task).body["choices"]
    assert first["finish_reason"] == "abort"
    assert first["text"].startswith("DE")
    reply = await server.post(LONG | {"timeout_s": 0.1})
    assert (reply.status, reply.error["type"]) == (408, "timeout_error")
    await until(lambda: not server.engine.has_work, 1.0)


async def test_a_search_that_fails_answers_with_the_error(server):
    def break_at(step):
        raise RuntimeError("broken on purpose")

    server.engine.before_step = break_at
    assert (await server.post(SEARCH)).status == 500


async def test_all_beams_count_against_the_keys_tokens(start):
    server = await start(api_keys=(ApiKey("a", ApiKey.of("k").digest, "user", Limits(None, 20)),))
    headers = {"Authorization": "Bearer k"}
    first = await server.post(SEARCH | {"max_tokens": 6}, headers=headers)
    assert first.body["usage"]["completion_tokens"] == 18
    assert (await server.post(SEARCH, headers=headers)).status == 429
