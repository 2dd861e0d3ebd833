"""The server over the real engine, on models whose answers are known."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
import anthropic
import jsonschema
import openai
import pydantic
import pytest
from langchain_openai import ChatOpenAI

from jaxpaged.config.settings import (
    CacheSettings,
    CompileSettings,
    EngineConfig,
    ModelSettings,
    SchedulerSettings,
)
from jaxpaged.engine.async_engine import AsyncLLM
from server.app import create_app
from server.batching.store import BatchStore
from server.listener import Listener
from tests.server.batching.conftest import line
from tests.server.batching.test_batches import ended, made, records, text_of
from tests.server.conftest import CHAT, COMPLETIONS, Running
from tests.server.test_tools import streamed
from tests.support.models import BOS, byte_ids, write_model
from tests.support.schemas import ODD_WORDS, SCHEMA_WITH_REFERENCE

MELT = "\U0001fae0"
FIELDS = ("structured_outputs", "max_tokens")
STREAM = {"stream": True}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """Engines by model name, each made once; they are closed at the end."""
    folder, made = tmp_path_factory.mktemp("models"), dict[str, AsyncLLM]()

    def engine(name: str) -> AsyncLLM:
        if name not in made:
            made[name] = AsyncLLM.from_config(_config(write_model(name, folder), name))
        return made[name]

    yield engine
    for llm in made.values():
        llm.close()


def _config(path: Path, name: str) -> EngineConfig:
    return EngineConfig(
        model=ModelSettings(model=str(path), served_model_name=(name,)),
        cache=CacheSettings(num_gpu_blocks_override=200),
        scheduler=SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64),
        compile=CompileSettings(warmup="lazy", compile_cache_dir=""),
    )


type Serve = Callable[..., Awaitable[Running]]


@pytest.fixture
async def serve(engines) -> AsyncIterator[Serve]:
    closing = []

    async def start(name: str, store: BatchStore | None = None) -> Running:
        llm = engines(name)
        app, listening = create_app(llm, store=store), socket.create_server(("127.0.0.1", 0))
        listener = await Listener.start(app, listening)
        session = aiohttp.ClientSession()
        closing.append((session, listener))
        engine = llm.parts.engine
        return Running(llm, engine, app, f"http://127.0.0.1:{listening.getsockname()[1]}", session)

    yield start
    for session, listener in closing:
        await session.close()
        await listener.close()


@asynccontextmanager
async def unchanged(server: Running, body: dict):
    """Whatever happens meanwhile, this request's answer stays the same."""
    before = (await server.post(body)).text
    yield
    assert (await server.post(body)).text == before


async def test_the_successor_model_counts_up(serve):
    server = await serve("S")
    for body in ({"prompt": "ABC"}, {"prompt": byte_ids("ABC")}):
        assert (await server.post(body | {"max_tokens": 5})).text == "DEFGH"
    stream = await server.post({"prompt": "ABC", "max_tokens": 5} | WITH_USAGE)
    assert "".join(stream.texts) == "DEFGH"
    assert stream.events[-1]["usage"]["completion_tokens"] == 5


async def test_an_answers_times_add_up(serve):
    server = await serve("S")
    body = {"prompt": "ABC", "max_tokens": 9, "ignore_eos": True}
    begun = time.monotonic()
    told = [(await server.post(body)).body, (await server.post(body | WITH_USAGE)).events[-1]]
    most_ms = 1000 * (time.monotonic() - begun)
    for times in (answer["metrics"] for answer in told):
        busy_ms = times["time_to_first_token_ms"] + times["generation_time_ms"]
        assert 0 <= times["queue_time_ms"] < most_ms - busy_ms
        assert 0 < busy_ms < most_ms
        assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 8, abs=0.01)
        assert times["tokens_per_second"] == pytest.approx(9000 / busy_ms, rel=0.01)
    stopped = (await server.post(body | {"stop": ["F"]})).body
    assert stopped["usage"]["completion_tokens"] == 3
    between_ms = stopped["metrics"]["generation_time_ms"] / 2
    assert stopped["metrics"]["mean_itl_ms"] == pytest.approx(between_ms, abs=0.01)
    assert (await server.post(body | {"n": 2})).body["metrics"] is None


@pytest.mark.slow
async def test_echo_scores_the_prompt(serve):
    server = await serve("S")
    reply = await server.post({"prompt": "ABC", "echo": True, "logprobs": 2, "max_tokens": 1})
    choice = reply.body["choices"][0]
    assert choice["text"] == "ABCD"
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is None
    assert lists["token_logprobs"][1:] == pytest.approx([-0.661] * 3, abs=1e-3)
    assert sorted(lists["top_logprobs"][3].values()) == pytest.approx([-1.661, -0.661], abs=1e-3)
    reply = await server.post({"prompt": "ABC", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert reply.text == "ABC"
    assert reply.body["usage"]["completion_tokens"] == 0


@pytest.mark.slow
async def test_stop_strings_and_min_tokens(serve):
    server = await serve("S")
    body = {"prompt": "ABC", "stop": ["FGH"], "max_tokens": 10}
    plain, stream = await server.post(body), await server.post(body | {"stream": True})
    assert plain.text == "".join(stream.texts) == "DE"
    assert all("F" not in text for text in stream.texts)
    body = {"prompt": "ABC", "min_tokens": 5, "max_tokens": 8}
    assert (await server.post(body | {"stop": ["E"]})).text == "DEFGHIJK"
    assert (await server.post(body | {"stop": ["J"]})).text == "DEFGHI"


async def test_a_batch_is_answered_beside_live_requests(serve, tmp_path):
    server = await serve("S", BatchStore(tmp_path, 10**6, 10**7))
    lines = [line(f"{i}", prompt=text) for i, text in enumerate(("ABC", "MNO", "123"))]
    base_url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        batch = await made(client, *lines)
        live = await server.post({"prompt": "ABC", "max_tokens": 5})
        found = await ended(client, batch, within=60)
        texts = {r["custom_id"]: text_of(r) for r in await records(client, found.output_file_id)}
    assert live.text == "DEFGH"
    assert texts == {"0": "DEF", "1": "PQR", "2": "456"}


async def test_bad_token_ids_leave_neighbours_alone(serve):
    server = await serve("S")
    neighbour = {"prompt": "MNO", "max_tokens": 40, "logprobs": 2}
    quiet = (await server.post(neighbour)).body["choices"][0]
    fields = ("stop_token_ids", "allowed_token_ids")
    bad = [{"prompt": "ABC", name: [i], "min_tokens": 1} for name in fields for i in (512, -1)]
    bad += [{"prompt": [512]}, {"prompt": [-1]}, {"prompt": "ABC", "logit_bias": {"512": 1}}]
    replies = await asyncio.gather(
        *[server.post(neighbour) for _ in range(3)], *[server.post(body) for body in bad]
    )
    assert [reply.status for reply in replies[3:]] == [400] * len(bad)
    for reply in replies[:3]:
        choice = reply.body["choices"][0]
        assert choice["text"] == quiet["text"]
        want = quiet["logprobs"]["token_logprobs"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(want, abs=1e-3)


@pytest.mark.slow
async def test_choices_differ_and_repeat(serve):
    server = await serve("S")
    body = {"prompt": "ABC", "n": 4, "seed": 7, "temperature": 1, "max_tokens": 6}
    first, again = [
        [choice["text"] for choice in (await server.post(body)).body["choices"]] for _ in range(2)
    ]
    assert first == again
    assert len(set(first)) >= 2


@pytest.mark.slow
async def test_penalties_count_the_prompt_also_from_the_cache(serve):
    server = await serve("S")
    body = {"prompt": "D" + "A" * 40 + "C", "repetition_penalty": 1.5, "max_tokens": 1}
    assert [(await server.post(body)).text for _ in range(3)] == ["E"] * 3


@pytest.mark.slow
async def test_a_split_character_and_its_bytes(serve):
    server = await serve("S-emoji")
    stream = await server.post({"prompt": "x", "max_tokens": 5} | WITH_USAGE)
    assert "".join(stream.texts) == MELT + "y"
    assert all("\ufffd" not in text for text in stream.texts)
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1, "max_tokens": 4}
    entries = (await server.post(body, CHAT)).body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in MELT.encode()]
    assert [e["top_logprobs"][0]["bytes"] for e in entries] == [[b] for b in MELT.encode()]


async def test_prompts_as_long_as_the_context(serve):
    server = await serve("R")
    cases = [(256, {"max_tokens": 1}), (255, {"max_tokens": 1, "ignore_eos": True}),
             (255, {"max_tokens": 2}), (256, {"max_tokens": 0, "echo": True})]  # fmt: skip
    replies = [await server.post({"prompt": [1] * length} | more) for length, more in cases]
    assert [reply.status for reply in replies] == [400, 200, 400, 200]
    assert "255" in replies[2].error["message"]
    assert replies[3].body["usage"]["completion_tokens"] == 0


@pytest.mark.slow
async def test_exactly_one_bos(serve):
    server = await serve("R-bos")
    want = [BOS, *byte_ids("ABC")]
    messages = [{"role": "user", "content": "ABC"}]
    for body in ({"messages": messages}, {"prompt": "ABC"}):
        assert (await server.post(body, "/tokenize")).body["tokens"] == want
    body = {"messages": messages, "max_tokens": 1, "ignore_eos": True}
    assert (await server.post(body, CHAT)).body["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_give_their_pages_back(serve, stream):
    server = await serve("R")
    async with unchanged(server, {"prompt": [5, 9, 13], "max_tokens": 8}):
        body = {"prompt": "ABC", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        for _ in range(5):
            task = asyncio.create_task(server.post(body))
            async with asyncio.timeout(30):
                while not server.llm.load.num_running:
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(1):
                while server.llm.load.num_running or server.llm.load.kv_cache_usage:
                    await asyncio.sleep(0.001)
        server.engine.scheduler.pool.check()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_answer_that_repeats_itself_says_so(serve, path):
    server = await serve("R")
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": ASK["messages"]}
    wanted = {"max_pattern_size": 3, "min_count": 4}
    body = prompt | {"max_tokens": 90, "logit_bias": {"5": 100}, "ignore_eos": True}
    body |= {"return_token_ids": True, "repetition_detection": wanted}
    (choice,) = (await server.post(body, path)).body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["token_ids"] == [5] * 4
    last = (await server.post(body | STREAM, path)).events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
    bad = body | {"repetition_detection": {"max_pattern_size": 3}}
    assert (await server.post(bad, path)).error["param"] == "repetition_detection"


ITEM = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
PUT = {
    "name": "put",
    "parameters": {
        "type": "object",
        "properties": {"items": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 2}},
        "required": ["items"],
    },
}
WORD = {
    "name": "word",
    "parameters": {
        "type": "object",
        "properties": {"w": {"$ref": "#/$defs/w"}},
        "required": ["w"],
        "$defs": {"w": {"enum": ["naïve", "数据", 'a"b']}},
    },
}
TOOLS = [{"type": "function", "function": one} for one in (PUT, WORD)]
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 120}


def made_calls(choice: dict) -> list[tuple[str, str]]:
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    for function in functions:
        schema = next(one["parameters"] for one in (PUT, WORD) if one["name"] == function["name"])
        jsonschema.validate(json.loads(function["arguments"]), schema)
    return [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_tool_that_must_be_called_is_called_alike_in_a_stream(serve, temperature):
    server = await serve("R")
    for tool in (PUT, WORD):
        choice = {"type": "function", "function": {"name": tool["name"]}}
        body = ASK | {"tool_choice": choice, "temperature": temperature, "seed": 3}
        plain = (await server.post(body, CHAT)).body["choices"][0]
        ((name, arguments),) = made_calls(plain)
        assert name == tool["name"]
        message, reason = streamed((await server.post(body | {"stream": True}, CHAT)).events)
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": name, "arguments": arguments}
        assert (message["content"], reason) == ("", "tool_calls")


async def test_some_tool_must_be_called(serve):
    server = await serve("R")
    body = ASK | {"tool_choice": "required", "temperature": 1}
    for seed in range(4):
        one = body | {"seed": seed, "parallel_tool_calls": False}
        assert len(made_calls((await server.post(one, CHAT)).body["choices"][0])) == 1
        many = (await server.post(body | {"seed": seed}, CHAT)).body["choices"][0]
        message, _ = streamed(
            (await server.post(body | {"seed": seed, "stream": True}, CHAT)).events
        )
        functions = [call["function"] for call in message["tool_calls"]]
        assert [(f["name"], f["arguments"]) for f in functions] == made_calls(many)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "word"}}])
@pytest.mark.parametrize(
    "stops", [{"stop": ['"', "w"]}, {"stop_token_ids": byte_ids('"w')}, {"stop": "a", "n": 2}]
)
async def test_what_stops_other_answers_never_cuts_a_forced_call(serve, choice, stops):
    server = await serve("R")
    body = ASK | {"tool_choice": choice, "temperature": 0}
    calls = made_calls((await server.post(body, CHAT)).body["choices"][0])
    for told in (await server.post(body | stops, CHAT)).body["choices"]:
        assert made_calls(told) == calls
        assert told["stop_reason"] is None
    if "n" not in stops:
        message, reason = streamed((await server.post(body | stops | STREAM, CHAT)).events)
        functions = [call["function"] for call in message["tool_calls"]]
        assert [(f["name"], f["arguments"]) for f in functions] == calls
        assert reason == "tool_calls"


async def test_a_schema_that_is_not_served_is_refused_as_the_tools(serve):
    server = await serve("R")
    tool = {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}
    body = ASK | {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    reply = await server.post(body, CHAT)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    form = {"type": "json_object"}
    reply = await server.post(ASK | {"tool_choice": "required", "response_format": form}, CHAT)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


class Weather(pydantic.BaseModel):
    """How the weather is."""

    sky: Literal["clear", "grey"]
    degrees: int


async def test_the_official_clients_get_structured_answers(serve):
    server = await serve("R")
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "R", "messages": messages}
    parsed = await client.chat.completions.parse(**asked, response_format=Weather, max_tokens=80)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    answer = await client.responses.parse(
        model="R", input="hi", text_format=Weather, max_output_tokens=80
    )
    assert isinstance(answer.output_parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    called = await client.chat.completions.parse(
        **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=120
    )
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    await client.close()
    other = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
    put = {"name": "put", "input_schema": PUT["parameters"]}
    choice = {"type": "tool", "name": "put"}
    message = await other.messages.create(**asked, tools=[put], tool_choice=choice, max_tokens=80)
    jsonschema.validate(message.content[0].input, PUT["parameters"])
    await other.close()


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_langchain_gets_structured_answers(serve, method):
    server = await serve("R")
    chat = ChatOpenAI(
        model="R", base_url=f"{server.url}/v1", api_key="none", max_retries=0, max_tokens=80
    )
    answer = await chat.with_structured_output(Weather, method=method).ainvoke("hi")
    assert isinstance(answer, Weather)


async def test_the_official_client_gets_json_of_its_schema(serve):
    server = await serve("R")
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA_WITH_REFERENCE}}
    messages = [{"role": "user", "content": "ABC"}]
    async with client:
        chats = await asyncio.gather(
            *[
                client.chat.completions.create(
                    model="R", messages=messages, response_format=wanted, seed=seed, max_tokens=40
                )
                for seed in range(12)
            ]
        )
        answers = [json.loads(chat.choices[0].message.content)["w"] for chat in chats]
        assert set(answers) <= set(ODD_WORDS)
        assert {chat.choices[0].finish_reason for chat in chats} == {"stop"}
        stream = await client.chat.completions.create(
            model="R", messages=messages, response_format={"type": "json_object"}, seed=1,
            max_tokens=25, stream=True,
        )  # fmt: skip
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        assert isinstance(json.loads(text), dict)
        done = await client.completions.create(
            model="R", prompt="x", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert done.choices[0].text in ("yes", "no")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="R", prompt="x", max_tokens=2, extra_body={"response_format": wanted}
            )
        assert caught.value.param == "max_tokens"
        assert "takes 12 tokens" in str(caught.value)


async def test_a_heavy_or_hopeless_grammar_holds_up_nobody(serve):
    server = await serve("R")
    heavy = {"type": "array", "items": {"type": "string", "maxLength": 20_000}, "minItems": 3}
    nested: dict = {"type": "string"}
    for _ in range(120):
        nested = {"type": "array", "items": nested}
    bad = [{"json": heavy}, {"json": nested}, {"regex": "(a{1,999}){1,999}" * 500}]
    bad += [{"grammar": "start: start"}, {"grammar": 'start: "a" x\nx: x'}]  # no token leads on
    jobs = [
        asyncio.create_task(server.post({"prompt": "x", "structured_outputs": each}))
        for each in bad
    ]
    async with unchanged(server, {"prompt": [5, 9, 13], "max_tokens": 8}):
        replies = await asyncio.gather(*jobs)
    assert {reply.status for reply in replies} <= {200, 400}
    assert all(r.status == 200 or r.error["param"] in FIELDS for r in replies)


async def _sleep_state(server: Running) -> str:
    told = (await server.get("/metrics")).raw.decode()
    (state,) = re.findall(r'^vllm:engine_sleep_state{.*sleep_state="(\w+)".*} 1\.0$', told, re.M)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_slept_answers_as_before(serve, level):
    server = await serve("S")
    body = {"prompt": "ABC", "max_tokens": 4}
    assert (await server.post(body)).text == "DEFG"
    assert await _sleep_state(server) == "awake"
    assert (await server.send("POST", f"/sleep?level={level}")).status == 200
    assert await _sleep_state(server) == {1: "weights_offloaded", 2: "discard_all"}[level]
    assert (await server.get("/is_sleeping")).body == {"is_sleeping": True}
    assert (await server.post(body)).status == 503
    assert (await server.send("POST", "/wake_up")).status == 200
    assert (await server.post(body)).text == "DEFG"
