"""/v1/responses: items, typed events, stored conversations, work in the background."""

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import cast

import msgspec
import openai
import pydantic
import pytest

from jaxpaged.openai.responses.answer import ResponseAnswer
from jaxpaged.openai.responses.store import ResponseStore, StoredResponse, Turn, parsed_bytes
from server import responses
from tests.server.conftest import Reply
from tests.server.test_messages import events_of
from tests.server.test_tools import ARGUMENTS, HERMES, SHOWS_ALL, TWO_CALLS

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
STOP = {"type": "function", "name": "stop", "parameters": {"type": "object"}}


def ask(given="ABC", **more):
    return {"model": "S", "input": given, "temperature": 0} | more


@pytest.fixture
async def client_of():
    made: list[openai.AsyncOpenAI] = []

    def make(server, key="none") -> openai.AsyncOpenAI:
        made.append(openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0))
        return made[-1]

    yield make
    for client in made:
        await client.close()


def prompt_of(server) -> str:
    """What the template made of the last request."""
    return server.llm.tokenizer.decode(server.engine.last_request.prompt_token_ids, False)


async def test_a_response_holds_a_message(server):
    body = (await server.post(ask(max_output_tokens=3), PATH)).body
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    part = {"type": "output_text", "text": "DEF", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (3, 3)
    assert (await server.get(f"{PATH}/{body['id']}")).body == body


async def test_events_are_numbered_and_end_with_the_whole(start):
    server = await start(script="<think>Hm.</think>" + TWO_CALLS,
                         model_settings=HERMES | {"reasoning_parser": "qwen3"})  # fmt: skip
    asked = ask(tools=[WEATHER, STOP])
    whole = (await server.post(asked, PATH)).body
    reply = await server.post(asked | {"stream": True}, PATH)
    found = events_of(reply)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert [name for name, _ in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0][1]["response"]["output"] == []
    last_name, last = found[-1]
    assert last_name == "response.completed"
    assert shapes(last["response"]) == shapes(whole)
    assert shapes(whole) == ["Hm.", "Let me look.", ("weather", ARGUMENTS), ("stop", "{}")]
    for place, item in enumerate(last["response"]["output"]):
        of_item = [d for _, d in found if d.get("output_index") == place]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[-1]["type"] == "response.output_item.done"
        assert of_item[-1]["item"] == item
        deltas = "".join(d["delta"] for d in of_item if d["type"].endswith(".delta"))
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == text
    details = whole["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= len("<think>Hm.</think>")


def shapes(response: dict) -> list:
    return [
        (item["name"], item["arguments"]) if "name" in item else item["content"][0]["text"]
        for item in response["output"]
    ]


async def test_a_conversation_goes_on_from_a_stored_response(start, client_of):
    server = await start(script=TWO_CALLS, template=SHOWS_ALL, model_settings=HERMES)
    client = client_of(server)
    tools = {"tools": [WEATHER, STOP], "model": "S"}
    first = await client.responses.create(input="?", instructions="Be brief", **tools)
    assert prompt_of(server) == "weather;stop;system:Be brief;user:?;"
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["weather", "stop"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls[:1]
    ]
    second = await client.responses.create(input=results, previous_response_id=first.id, **tools)
    assert prompt_of(server).startswith("weather;stop;user:?;assistant:Let me look.<Köln>")
    assert prompt_of(server).endswith("tool:rain;")
    assert second.previous_response_id == first.id
    again = [{"role": "user", "content": "?"}, *[i.model_dump() for i in first.output], *results]
    await client.responses.create(input=again, **tools)
    assert prompt_of(server).endswith("assistant:Let me look.<Köln><>;tool:rain;")
    async with client.responses.stream(input="?", **tools) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output_text == "Let me look."


async def test_what_is_not_to_be_stored_is_not(server):
    body = (await server.post(ask(max_output_tokens=1, store=False), PATH)).body
    reply = await server.get(f"{PATH}/{body['id']}")
    assert (reply.status, reply.error["code"]) == (404, "response_not_found")
    reply = await server.post(ask(previous_response_id=body["id"]), PATH)
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")


async def test_a_stored_response_is_its_keys_own_until_deleted(start):
    server = await start(api_keys=("one", "two"))
    headers = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    body = (await server.post(ask(max_output_tokens=1), PATH, headers=headers[0])).body
    path = f"{PATH}/{body['id']}"
    statuses = [(await server.get(path, headers=h)).status for h in headers]
    assert statuses == [200, 404]
    reply = await server.send("DELETE", path, headers=headers[0])
    assert reply.body == {"id": body["id"], "object": "response", "deleted": True}
    assert (await server.get(path, headers=headers[0])).status == 404


async def ended(server, path: str) -> dict:
    async with asyncio.timeout(5):
        while (body := (await server.get(path)).body)["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return body


async def test_a_response_in_the_background_can_be_waited_for_and_followed(server):
    body = (await server.post(ask(max_output_tokens=4, background=True), PATH)).body
    assert (body["status"], body["output"]) == ("queued", [])
    path = f"{PATH}/{body['id']}"
    assert shapes(await ended(server, path)) == ["DEFG"]
    found = events_of(await server.get(f"{path}?stream=true"))
    assert found[-1][0] == "response.incomplete"
    rest = events_of(await server.get(f"{path}?stream=true&starting_after=2"))
    assert rest == found[3:]
    assert server.state.num_working == 0


async def test_a_response_in_the_background_outlives_its_client(server):
    server.engine.before_step = lambda step: time.sleep(0.002)
    asked = ask(max_output_tokens=100, background=True, stream=True)
    async with server.session.post(server.url + PATH, json=asked) as response:
        first = await response.content.readuntil(b"\n\n")
    created = msgspec.json.decode(first.split(b"data: ")[1])["response"]
    body = await ended(server, f"{PATH}/{created['id']}")
    assert body["usage"]["output_tokens"] == 100


async def test_a_response_in_the_background_can_be_cancelled(server):
    server.engine.before_step = lambda step: time.sleep(0.002)
    asked = ask(max_output_tokens=1500, background=True)
    path = f"{PATH}/{(await server.post(asked, PATH)).body['id']}"
    while not server.engine.load_size:
        await asyncio.sleep(0.005)
    assert (await server.send("POST", f"{path}/cancel")).body["status"] == "cancelled"
    async with asyncio.timeout(2):
        while server.engine.load_size:
            await asyncio.sleep(0.005)
    assert server.state.open_ids == set()
    reply: Reply = await server.post(ask(max_output_tokens=1), PATH)
    refused = await server.send("POST", f"{PATH}/{reply.body['id']}/cancel")
    assert refused.status == 400


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}])
async def test_a_response_that_an_operator_ends_is_cancelled_with_what_there_is(server, more):
    server.engine.before_step = lambda step: time.sleep(0.002)
    task = asyncio.create_task(server.post(ask(max_output_tokens=1500) | more, PATH))
    while server.engine.num_steps < 5:
        await asyncio.sleep(0.005)
    (job,) = server.state.open_jobs
    name = job.envelope.answer_id.replace("chatcmpl-", "resp_")
    await server.post({"request_ids": [name]}, "/inference/v1/abort_requests")
    reply = await task
    if more.get("stream"):
        kind, last = events_of(reply)[-1]
        assert kind == "response.incomplete"
        body = last["response"]
    else:
        body = await ended(server, f"{PATH}/{reply.body['id']}")
    (item,) = body["output"]
    assert (body["id"], body["status"], item["status"]) == (name, "cancelled", "incomplete")
    assert item["content"][0]["text"].startswith("DEF")
    assert body["usage"]["output_tokens"] >= 3
    assert body["incomplete_details"] is None


async def test_the_input_of_a_response_is_listed(server, client_of):
    client = client_of(server)
    given = [
        {"role": "user", "content": "ABC"},
        {"role": "assistant", "content": "DEF"},
        {"role": "user", "content": [{"type": "input_text", "text": "GHI"}]},
    ]
    asked = {"model": "S", "max_output_tokens": 1}
    first = await client.responses.create(input=given, **asked)
    items = [i async for i in client.responses.input_items.list(first.id, order="asc", limit=2)]
    assert [(i.type, i.role, i.content[0].text) for i in items] == [
        ("message", "user", "ABC"), ("message", "assistant", "DEF"), ("message", "user", "GHI"),
    ]  # fmt: skip
    again = [i async for i in client.responses.input_items.list(first.id, after=items[1].id)]
    assert again == [items[0]]
    last = await client.responses.create(input="X", previous_response_id=first.id, **asked)
    (only,) = [i async for i in client.responses.input_items.list(last.id)]
    assert only.content[0].text == "X"
    for query in ("after=x", f"after=msg_{'0' * 32}", "limit=0", "order=x"):
        assert (await server.get(f"{PATH}/{first.id}/input_items?{query}")).status == 400


async def test_an_answer_may_be_held_to_a_schema(start, client_of):
    class City(pydantic.BaseModel):
        name: str

    server = await start(script='{"name":"K"}')
    asked = {"model": "S", "input": "?", "max_output_tokens": 30}
    found = await client_of(server).responses.parse(text_format=City, **asked)
    assert found.output_parsed == City(name="K")
    assert server.engine.last_request.params.structured_outputs is not None


async def test_responses_in_the_background_are_limited_for_each_key(server, monkeypatch):
    server.engine.before_step = lambda step: time.sleep(0.01)
    monkeypatch.setattr(responses, "MAX_BACKGROUND", 2)
    asked = ask(max_output_tokens=1000, background=True)
    replies = [await server.post(asked, PATH) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    for reply in replies[:2]:
        path = f"{PATH}/{reply.body['id']}/cancel"
        bodies = [(await server.send("POST", path)).body for _ in range(2)]
        assert [body["status"] for body in bodies] == ["cancelled"] * 2
    assert server.state.num_working == 0


def stored(
    key_id: str, name: str, num_bytes: int, status="completed", before: Turn | None = None
) -> StoredResponse:
    answer = SimpleNamespace(fields={"id": name, "usage": None}, is_ended=status == "completed")
    return StoredResponse(key_id, cast(ResponseAnswer, answer), Turn([], before), [], num_bytes)


def test_a_key_pushes_out_its_own_responses_and_the_largest_gives_way():
    store = ResponseStore(max_stored=2, max_bytes=100_000)
    for name in ("a", "b", "c"):
        store.add(stored("one", name, 10))
    store.add(stored("two", "a", 10))
    assert [store.get(name, "one") is None for name in "abc"] == [True, False, False]
    assert store.get("a", "two")
    assert not store.get("b", "two")
    store.add(stored("two", "b", 49_000))
    assert [bool(store.get("b", key)) for key in ("one", "two")] == [True, False]
    store.add(stored("two", "running", 49_000, "in_progress"))
    assert store.get("running", "two")


def test_a_turn_is_kept_and_counted_as_long_as_a_response_goes_on_from_it():
    store = ResponseStore()
    first = stored("one", "a", 10_000)
    later = [stored("one", name, 10, before=first.turn) for name in "bc"]
    for one in (first, *later):
        store.add(one)
    own = first.num_bytes + sum(one.num_bytes + one.turn.num_bytes for one in later)
    assert store.num_bytes == own + 10_000
    for _ in range(2):
        store.delete(first)
        assert store.num_bytes == own - first.num_bytes + 10_000
    for one in later:
        store.delete(one)
    assert store.num_bytes == 0
    last = stored("one", "d", 10, before=first.turn)  # whose answer took so long
    store.add(last)
    assert store.num_bytes == 10_000 + last.num_bytes + last.turn.num_bytes


def test_a_conversation_cannot_hold_more_than_the_store_may():
    store, turn = ResponseStore(max_bytes=100_000), None
    for number in range(9):
        one = stored("one", str(number), 20_000, before=turn)
        store.add(one)
        turn = one.turn
        assert store.num_bytes <= 100_000
        assert bool(store.get(str(number), "one")) == (number < 3)


def test_a_body_of_many_small_values_counts_as_what_they_take():
    values = [[]] * 10_000
    taken = sum(sys.getsizeof(value) + 8 for value in values)
    assert parsed_bytes(b"[" + b",".join(b"[]" for _ in values) + b"]") > taken


def test_what_a_response_grows_by_in_the_background_is_counted():
    store = ResponseStore()
    one = stored("one", "a", 10, "in_progress")
    store.add(one)
    before = store.num_bytes
    one.events += [{}] * 100
    one.answer.fields["usage"] = {"output_tokens": 500}
    store.add(stored("two", "a", 10))  # of the same size as the other one was
    assert store.num_bytes > before + 100_000
    store.delete(one)
    assert store.num_bytes == before


async def test_a_failed_response_says_so(server):
    server.engine.before_step = lambda step: 1 / 0 if step == 5 else None
    found = events_of(await server.post(ask(stream=True), PATH))
    assert found[-1][0] == "response.failed"
    assert found[-1][1]["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{"}]}, "input[0]"),
        ({"text": {"format": "json_object"}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [STOP | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": "sometimes", "tools": [STOP]}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"conversation": "x"}, "conversation"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(server, more, param):
    reply = await server.post(ask() | more, PATH)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "max_tokens is -1" not in reply.error["message"]
