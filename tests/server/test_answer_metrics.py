"""`metrics` of answers: how long they took. The fake engine tells 2 ms, 40 ms and 10 ms a token."""

import asyncio
import json
import time

import openai
import pytest

from server.state import ServerLimits
from tests.server.conftest import CHAT, COMPLETIONS

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SAY = [{"role": "user", "content": "ABC"}]
BODIES = [(COMPLETIONS, {"prompt": "ABC"}), (CHAT, {"messages": SAY})]
RESPONSES = "/v1/responses"
FIVE = {
    "time_to_first_token_ms": 40.0,
    "queue_time_ms": 2.0,
    "generation_time_ms": 40.0,
    "mean_itl_ms": 10.0,
    "tokens_per_second": 62.5,
}


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stream_interval": 3}])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_tells_its_times(server, path, body, more):
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True}
    body = body | {"max_tokens": 5}
    assert (await server.post(body, path)).body["metrics"] == FIVE
    *earlier, last = (await server.post(body | WITH_USAGE | more, path)).events
    assert last["metrics"] == FIVE
    assert last["usage"]["completion_tokens"] == 5
    assert not any("metrics" in event for event in earlier)
    without = await server.post(body | {"stream": True} | more, path)
    assert not any("metrics" in event for event in without.events)


async def test_the_times_of_a_response_are_told_too(server):
    body = {"input": "ABC", "max_output_tokens": 5, "temperature": 0}
    reply = await server.send("POST", RESPONSES, json=body)
    assert reply.body["metrics"] == FIVE
    reply = await server.send("POST", RESPONSES, json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in reply.raw.split(b"\n") if line[:6] == b"data: "]
    assert events[-1]["response"]["metrics"] == FIVE
    assert not any("metrics" in event.get("response", {}) for event in events[:-1])


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt": ["ABC", "KLM"]}, {"n": 2, "use_beam_search": True}]
)
async def test_several_answers_have_no_times(server, more):
    body = {"prompt": "ABC", "max_tokens": 3} | more
    assert (await server.post(body)).body["metrics"] is None
    assert (await server.post(body | WITH_USAGE)).events[-1]["metrics"] is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"stop": ["F"]}, {"generation_time_ms": 20.0, "mean_itl_ms": 10.0}),
        ({"max_tokens": 1}, {"generation_time_ms": 0.0, "mean_itl_ms": None}),
    ],
)
async def test_a_stopped_and_a_short_answer_tell_theirs(server, more, told):
    body = {"prompt": "ABC", "max_tokens": 9} | more
    assert (await server.post(body)).body["metrics"].items() >= told.items()
    assert (await server.post(body | WITH_USAGE)).events[-1]["metrics"].items() >= told.items()


async def test_without_a_token_only_the_queue_is_told(server):
    reply = await server.post({"prompt": "ABC", "max_tokens": 0, "echo": True})
    assert reply.body["metrics"] == dict.fromkeys(FIVE) | {"queue_time_ms": 2.0}


async def test_an_answer_that_is_ended_tells_its_times(server):
    server.engine.before_step = lambda step: time.sleep(0.01)
    body = {"prompt": "ABC", "max_tokens": 1000, "ignore_eos": True}
    plain = asyncio.create_task(server.post(body))
    stream = asyncio.create_task(server.post(body | WITH_USAGE))
    while server.state.num_working < 2 or server.engine.num_steps < 5:
        await asyncio.sleep(0.01)
    ids = sorted(server.state.open_ids)
    await server.send("POST", "/inference/v1/abort_requests", json={"request_ids": ids})
    for told in ((await plain).body, (await stream).events[-1]):
        num_tokens = told["usage"]["completion_tokens"]
        assert told["metrics"]["generation_time_ms"] == pytest.approx(10 * (num_tokens - 1))


@pytest.mark.parametrize("more", [{}, {"n": 2}])
async def test_times_are_left_out_where_the_operator_wants_it(start, more):
    server = await start(limits=ServerLimits(tells_times=False))
    for path, body in BODIES:
        body = body | {"max_tokens": 5} | more
        assert "metrics" not in (await server.post(body, path)).body
        assert "metrics" not in (await server.post(body | WITH_USAGE, path)).events[-1]


async def test_openais_client_reads_them_beside_what_it_knows(server):
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    async with client:
        answer = await client.chat.completions.create(
            model="S", messages=[{"role": "user", "content": "ABC"}], max_tokens=5, temperature=0
        )
        assert answer.choices[0].message.content == "DEFGH"
        assert (answer.model_extra or {})["metrics"] == FIVE
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                model="S", prompt="ABC", max_tokens=5, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        ]  # fmt: skip
    assert (chunks[-1].model_extra or {})["metrics"] == FIVE


async def test_the_document_tells_their_names(server):
    document = (await server.get("/openapi.json")).body
    assert set(document["components"]["schemas"]["AnswerMetrics"]["properties"]) == set(FIVE)
    for path in (COMPLETIONS, CHAT, RESPONSES):
        answer = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert answer["application/json"]["schema"]["$ref"].endswith("/TimedAnswer")
