"""/v1/messages: Anthropic's client is served, whole and streamed."""

import anthropic
import msgspec
import pytest

from server.state import ServerLimits
from tests.server.conftest import Reply, Running
from tests.server.test_tools import ARGUMENTS, HERMES, SHOWS_ALL, TWO_CALLS

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
STOP = {"name": "stop", "input_schema": {"type": "object"}}


def ask(content="ABC", **more):
    messages = [{"role": "user", "content": content}]
    return {"model": "S", "max_tokens": 300, "messages": messages, "temperature": 0} | more


def events_of(reply: Reply) -> list[tuple[str, dict]]:
    """(name, data) of a stream's events."""
    assert reply.raw.endswith(b"\n\n")
    found = []
    for event in reply.raw.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        fields = msgspec.json.decode(data.removeprefix(b"data: "))
        found.append((name.removeprefix(b"event: ").decode(), fields))
        assert fields["type"] == found[-1][0]
    return found


@pytest.fixture
async def client_of():
    made: list[anthropic.AsyncAnthropic] = []

    def make(server: Running, key: str = "none") -> anthropic.AsyncAnthropic:
        made.append(anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0))
        return made[-1]

    yield make
    for client in made:
        await client.close()


async def test_a_message_is_answered(server):
    body = (await server.post(ask(max_tokens=3), PATH)).body
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "S",
        "content": [{"type": "text", "text": "DEF"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


async def test_events_come_in_anthropics_order(server):
    found = events_of(await server.post(ask(max_tokens=3, stream=True), PATH))
    names = [name for name, _ in found]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0][1]["message"]["usage"]["input_tokens"] == 3
    texts = [data["delta"]["text"] for name, data in found if name == "content_block_delta"]
    assert "".join(texts) == "DEF"
    assert found[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2][1]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(server, stream):
    reply = await server.post(ask(stop_sequences=["GH", "X"], stream=stream), PATH)
    told = events_of(reply)[-2][1]["delta"] if stream else reply.body
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "GH")


async def test_blocks_of_all_turns_reach_the_template(start):
    server = await start(script="ok", template=SHOWS_ALL, model_settings=HERMES)
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "K"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}]}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hm"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    body = ask(messages=messages, system=system, tools=[WEATHER])
    want = "weather;system:Be\nbrief;user:?;assistant:Hm<K>;tool:r;user:So?;"
    assert (await server.post(body, COUNT)).body == {"input_tokens": len(want)}
    assert (await server.post(body, PATH)).body["content"] == [{"type": "text", "text": "ok"}]
    assert server.engine.last_request.prompt_token_ids == tuple(
        server.llm.tokenizer.encode(want, add_special_tokens=False)
    )


async def test_a_last_message_of_the_assistant_is_continued(start):
    server = await start(template="{% for m in messages %}{{ m.content }}|{% endfor %}")
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "KLM"}]
    body = (await server.post(ask(messages=messages, max_tokens=1), PATH)).body
    assert body["content"][0]["text"] == "N"


async def test_the_official_client_gets_tools_and_thoughts(start, client_of):
    script = "<think>\nHm.\n</think>\n\n" + TWO_CALLS
    server = await start(script=script, model_settings=HERMES | {"reasoning_parser": "qwen3"})
    client = client_of(server)
    asked = {"tools": [WEATHER, STOP]} | ask()
    asked.pop("temperature")
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        thoughts, text, weather, stop = message.content
        assert (thoughts.thinking, text.text) == ("Hm.", "Let me look.")
        assert (weather.name, weather.input) == ("weather", msgspec.json.decode(ARGUMENTS))
        assert (stop.name, stop.input) == ("stop", {})
        assert message.usage.output_tokens == len(script.encode()) + 1
    history = [*asked["messages"], {"role": "assistant", "content": whole.content}]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        for block in whole.content
        if block.type == "tool_use"
    ]
    history.append({"role": "user", "content": results})
    again = await client.messages.create(**asked | {"messages": history})
    assert again.stop_reason == "tool_use"
    count = await client.messages.count_tokens(model="S", messages=asked["messages"])
    assert count.input_tokens == 3


async def test_the_official_client_sends_its_key_and_gets_typed_errors(start, client_of):
    server = await start(api_keys=("secret",))
    good, bad = client_of(server, "secret"), client_of(server, "wrong")
    asked = {"model": "S", "max_tokens": 2, "messages": [{"role": "user", "content": "ABC"}]}
    assert (await good.messages.create(**asked)).content[0].type == "text"
    for key, status in (("secret", 200), ("wrong", 401)):
        reply = await server.post(ask(max_tokens=1), PATH, headers={"X-Api-Key": key})
        assert reply.status == status
    with pytest.raises(anthropic.AuthenticationError):
        await bad.messages.create(**asked)
    with pytest.raises(anthropic.NotFoundError):
        await good.messages.create(**asked | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError) as caught:
        await good.messages.create(**asked | {"max_tokens": 0})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**6}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]},
            "messages[0].content",
        ),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [STOP]}, "tool_choice"),
        ({"tools": [STOP], "tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"temperature": -1}, "temperature"),
        ({"system": [{"type": "image"}]}, "system"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(server, more, param):
    reply = await server.post(ask() | more, PATH)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_refusal_tells_what_is_wrong_with_the_field_that_was_sent(server):
    reply = await server.post(ask(stop_sequences=["a"] * 17), PATH)
    assert reply.error["message"].startswith("stop_sequences has 17 entries")
    assert "function." not in reply.error["message"]
    assert not reply.error["message"].startswith("stop ")


async def test_errors_have_anthropics_shape_also_under_a_prefix(start):
    limits = ServerLimits(root_path="/llm", max_request_bytes=1000)
    server = await start(limits=limits)
    large = await server.post(ask("x" * 2000), f"/llm{PATH}")
    assert (large.status, large.body["type"]) == (413, "error")
    assert large.error["type"] == "request_too_large"
    wrong = await server.post(ask(max_tokens="x"), f"/llm{COUNT}")
    assert wrong.status == 200  # counting asks nothing of max_tokens
    wrong = await server.post({"messages": "x"}, f"/llm{COUNT}")
    assert (wrong.status, wrong.body["type"]) == (400, "error")


async def test_an_error_in_a_stream_is_an_event(server):
    server.engine.before_step = lambda step: 1 / 0 if step == 5 else None
    found = events_of(await server.post(ask(stream=True), PATH))
    assert found[-1][0] == "error"
    assert found[-1][1]["error"]["type"] == "api_error"
