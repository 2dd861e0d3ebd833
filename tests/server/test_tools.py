"""Tools and reasoning over HTTP: calls, streamed and whole, and what may be asked of them."""

import json
import re
import time

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from jaxpaged.config.settings import ModelSettings
from jaxpaged.openai.schema import ChatRequest
from jaxpaged.openai.tools import tool_use
from tests.server.conftest import CHAT, Running
from tests.support.models import byte_ids

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
ARRAY = {"type": ["array", "null"]}
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
TWO_CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = '{"city": "Köln", "days": 2}'
SHOWS_ALL = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.arguments.city }}>{% endfor %};"
    "{% endfor %}"
)


def ask(**more):
    message = {"role": "user", "content": "How is it in Köln?"}
    return {"messages": [message], "tools": [WEATHER, STOP]} | more


def streamed(events) -> tuple[dict, str]:
    """The message that a stream's deltas make, and why it ended; ids and names come once."""
    message: dict = {"reasoning": "", "content": "", "tool_calls": []}
    reason = None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for field in ("reasoning", "content"):
                message[field] += delta.get(field) or ""
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(piece | {"function": dict(piece["function"])})
                else:
                    function = message["tool_calls"][piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


async def test_calls_are_told_apart_from_content(start):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    reply = await server.post(ask(max_tokens=300), CHAT)
    choice = reply.body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "stop"]
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS, "{}"]
    assert len({call["id"] for call in calls}) == 2
    assert {call["type"] for call in calls} == {"function"}
    assert reply.body["usage"]["completion_tokens"] == len(byte_ids(TWO_CALLS)) + 1


async def test_streamed_calls_join_to_the_whole_answer(start):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    whole = (await server.post(ask(max_tokens=300), CHAT)).body["choices"][0]["message"]
    server.engine.before_step = lambda step: time.sleep(0.002)
    options = {"include_usage": True}
    reply = await server.post(ask(max_tokens=300, stream=True, stream_options=options), CHAT)
    message, reason = streamed(reply.events)
    assert reason == "tool_calls"
    assert message["content"] == whole["content"]
    for one, other in zip(message["tool_calls"], whole["tool_calls"], strict=True):
        assert one["function"] == other["function"]
    assert reply.events[-1]["usage"]["completion_tokens"] == len(byte_ids(TWO_CALLS)) + 1
    told = [e["choices"][0]["delta"].get("tool_calls") for e in reply.events[:-1]]
    assert sum(bool(pieces) for pieces in told) > 5  # as they came, not at the end


async def test_without_parallel_calls_there_is_one(start):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    for stream in (False, True):
        reply = await server.post(ask(parallel_tool_calls=False, stream=stream), CHAT)
        if stream:
            message, _ = streamed(reply.events)
        else:
            message = reply.body["choices"][0]["message"]
        assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_limit_cuts_says_so(start, stream):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    reply = await server.post(ask(max_tokens=75, stream=stream), CHAT)
    if stream:
        message, reason = streamed(reply.events)
    else:
        choice = reply.body["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    assert reason == "length"
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert ARGUMENTS.startswith(arguments)
    assert 2 < len(arguments) < len(ARGUMENTS)


async def test_a_malformed_call_is_content(start):
    text = '<tool_call>{"name": "weather", "arguments": {city}}</tool_call>'
    server = await start(script=text, model_settings=HERMES)
    choice = (await server.post(ask(), CHAT)).body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    message, reason = streamed((await server.post(ask(stream=True), CHAT)).events)
    assert (message["content"], reason) == (text, "stop")


async def test_a_limit_of_reasoning_reaches_the_engine_and_needs_a_parser(start):
    server = await start(script="ok", model_settings={"reasoning_parser": "deepseek_r1"})
    limits = []
    for limit in (0, 7, -1, None):
        assert (await server.post(ask(tools=None, thinking_token_budget=limit), CHAT)).status == 200
        reasoning = server.engine.last_request.params.reasoning
        limits.append(None if reasoning is None else (reasoning.is_open, reasoning.max_tokens))
    assert limits == [(True, 0), (True, 7), None, None]
    refused = await server.post(ask(tools=None, thinking_token_budget=-2), CHAT)
    assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")
    server = await start(script="ok")
    refused = await server.post(ask(tools=None, thinking_token_budget=7), CHAT)
    assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")


BROKEN = '<tool_call>{"name": "weather", "arguments": {city}}</tool_call>'


@pytest.mark.parametrize(
    ("script", "outcome", "num_broken"),
    [(TWO_CALLS, "tool_call", 0), ("no call", "no_tool_call", 0), (BROKEN, "no_tool_call", 1)],
)
async def test_what_a_tool_parser_found_is_counted(start, script, outcome, num_broken):
    server = await start(script=script, model_settings=HERMES)
    item = {"type": "function"} | WEATHER["function"]
    asked = {"input": "Hi", "tools": [item]}
    await server.post(ask(n=2), CHAT)
    await server.post(ask(stream=True), CHAT)
    await server.post(ask(max_tokens=30), CHAT)  # a call that is cut departs from no format
    await server.post(asked, "/v1/responses")
    await server.post(asked | {"stream": True}, "/v1/responses")
    text = (await server.get("/metrics")).raw.decode()
    name = "vllm:tool_call_parser_invocations_total"
    counts = {
        (mode, kind): float(number)
        for mode, found, kind, number in re.findall(
            rf'{name}{{mode="(\w+)",model_name="S",outcome="(\w+)",request_type="(\w+)"}} (\S+)',
            text,
        )
        if found == outcome
    }
    assert counts["streaming", "chat_completions"] == 1
    assert counts["non_streaming", "chat_completions"] >= 2
    assert counts["streaming", "responses"] == counts["non_streaming", "responses"] == 1
    failed = 'jaxpaged:tool_call_parser_failures_total{model_name="S",request_type="responses"}'
    assert f"{failed} {2.0 * num_broken}" in text
    failed = failed.replace("responses", "chat_completions")
    assert f"{failed} {3.0 * num_broken}" in text


async def test_logprobs_and_ids_come_with_chunks_that_show_nothing(start):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    body = ask(stream=True, logprobs=True, return_token_ids=True)
    choices = [e["choices"][0] for e in (await server.post(body, CHAT)).events]
    ids = [i for choice in choices for i in choice.get("token_ids") or []]
    assert ids[:-1] == byte_ids(TWO_CALLS)
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == len(ids)


async def test_choice_none_hides_the_tools_and_reads_no_calls(start):
    server = await start(script=TWO_CALLS, template=SHOWS_ALL)
    body = ask(tool_choice="none", return_token_ids=True)
    reply = await server.post(body, CHAT)
    assert reply.body["choices"][0]["message"]["content"] == TWO_CALLS
    assert bytes_of(reply.body["prompt_token_ids"]).startswith("user:")


async def test_tools_and_earlier_calls_reach_the_template(start):
    server = await start(script="ok", template=SHOWS_ALL, model_settings=HERMES)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    reply = await server.post(ask(messages=messages, return_token_ids=True), CHAT)
    shown = bytes_of(reply.body["prompt_token_ids"])
    assert shown == "weather;stop;user:?;assistant:<Köln>;tool:rain;"
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    reply = await server.post(ask(tool_choice=choice, return_token_ids=True), CHAT)
    assert bytes_of(reply.body["prompt_token_ids"]).startswith("stop;user")


def bytes_of(ids: list[int]) -> str:
    """The text of byte tokens."""
    table = {byte_ids(chr(i))[0]: i for i in range(128)}
    table |= {byte_ids("ö")[0]: 0xC3, byte_ids("ö")[1]: 0xB6}
    return bytes(table[i] for i in ids).decode()


async def test_mistral_calls_need_special_tokens_in_the_text(start):
    settings = HERMES | {"tool_call_parser": "mistral"}
    server = await start(script='[TOOL_CALLS]weather{"city": "K"}', model_settings=settings)
    choice = (await server.post(ask(), CHAT)).body["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "K"}'
    assert server.engine.last_request.params.skip_special_tokens is False


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_a_field_of_its_own(start, stream):
    text = "<think>\nHm.\n</think>\n\n" + TWO_CALLS
    server = await start(script=text, model_settings=HERMES | {"reasoning_parser": "qwen3"})
    for shows in (True, False):
        reply = await server.post(ask(stream=stream, include_reasoning=shows), CHAT)
        message = reply.body["choices"][0]["message"] if not stream else streamed(reply.events)[0]
        assert message.get("reasoning", "") == ("Hm." if shows else "")
        assert message["content"] == "Let me look."
        assert len(message["tool_calls"]) == 2
        assert b"reasoning_content" not in reply.raw


async def test_reasoning_comes_before_what_a_schema_holds(start):
    """The fake engine only writes; `tests/engine/test_reasoning_gate.py` holds it to the schema."""
    settings = {"reasoning_parser": "deepseek_r1"}
    server = await start(script='Hm.</think>{"n": 1}', model_settings=settings)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "?"}], "response_format": form}
    message = (await server.post(body, CHAT)).body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"n": 1}')
    marks = server.engine.last_request.params.reasoning
    assert (marks.begin, marks.end, marks.is_open) == ("<think>", "</think>", True)
    closed = [{"role": "user", "content": "?</think>"}]
    await server.post(body | {"messages": closed}, CHAT)
    assert server.engine.last_request.params.reasoning is None


async def test_reasoning_that_the_prompt_opened_is_reasoning(start):
    settings = {"reasoning_parser": "qwen3"}
    server = await start(
        script="Hm.</think>Yes.",
        template="{{ messages[-1]['content'] }}<think>\n",
        model_settings=settings,
    )
    body = {"messages": [{"role": "user", "content": "?"}], "n": 2}
    choices = (await server.post(body, CHAT)).body["choices"]
    want = {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning": "Hm."}
    assert [choice["message"] for choice in choices] == [want, want]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [STOP, {"type": "function"}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": ARRAY}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
async def test_what_is_wrong_with_tools_is_refused_by_name(start, more, param):
    server = await start(model_settings=HERMES)
    reply = await server.post(ask() | more, CHAT)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_forced_calls_arguments_are_an_object_whatever_else_their_schema_allows():
    function = {"name": "x", "parameters": {"type": ["object", "null"], "maxProperties": 1}}
    choice = {"type": "function", "function": {"name": "x"}}
    tools = [{"type": "function", "function": function}]
    body = ChatRequest(messages=[], tools=tools, tool_choice=choice)
    assert tool_use(body, ModelSettings()).schema() == {"type": "object", "maxProperties": 1}


async def test_calls_in_free_text_need_a_parser(server):
    reply = await server.post(ask(), CHAT)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "--tool-call-parser" in reply.error["message"]
    assert (await server.post(ask(tools=[], max_tokens=2), CHAT)).status == 200


async def test_the_official_client_gets_calls(start):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    try:
        done = await client.chat.completions.create(model="S", **ask())
        calls = done.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "stop"]
        assert json.loads(calls[0].function.arguments) == {"city": "Köln", "days": 2}
        async with client.chat.completions.stream(model="S", **ask()) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS
        assert final.choices[0].message.content == "Let me look."
        history = [{"role": "user", "content": "?"}, done.choices[0].message.model_dump()]
        history += [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in calls]
        again = await client.chat.completions.create(model="S", **ask(messages=history))
        assert again.choices[0].finish_reason == "tool_calls"
    finally:
        await client.close()


def langchain(server: Running, **more) -> ChatOpenAI:
    return ChatOpenAI(
        model="S", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_retries=0, **more
    )


async def test_langchain_chats_and_streams(server):
    chat = langchain(server, max_tokens=3, stream_usage=True)
    assert (await chat.ainvoke("ABC")).content == "DEF"
    chunks = [chunk async for chunk in chat.astream([HumanMessage("ABC")])]
    assert "".join(chunk.content for chunk in chunks) == "DEF"
    assert sum(c.usage_metadata["total_tokens"] for c in chunks if c.usage_metadata) == 6


async def test_langchain_calls_tools_and_gives_their_answers_back(start):
    server = await start(script=TWO_CALLS, model_settings=HERMES)
    chat = langchain(server).bind_tools([WEATHER, STOP])
    answer = await chat.ainvoke("?")
    assert [call["name"] for call in answer.tool_calls] == ["weather", "stop"]
    assert answer.tool_calls[0]["args"] == {"city": "Köln", "days": 2}
    whole = None
    async for chunk in chat.astream("?"):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [c["args"] for c in answer.tool_calls]
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls]
    last = await chat.ainvoke([HumanMessage("?"), answer, *results])
    assert isinstance(last, AIMessage)
