"""What /v1/chat/completions answers, and how messages become a prompt."""

import pytest

from tests.server.conftest import CHAT
from tests.support.models import BOS, byte_ids

MELT = "\U0001fae0"


def ask(content, **more):
    return {"messages": [{"role": "user", "content": content}]} | more


async def test_a_message_is_answered(server):
    reply = await server.post(ask("ABC", max_tokens=3), CHAT)
    body = reply.body
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "DEF", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert body["usage"]["total_tokens"] == 6


async def test_a_stream_opens_with_the_role(server):
    events = (await server.post(ask("ABC", max_tokens=3, stream=True), CHAT)).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == "DEF"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]


async def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    reply = await server.post(ask(parts, max_tokens=1, return_token_ids=True), CHAT)
    assert reply.body["prompt_token_ids"] == byte_ids("A\nB")


async def test_a_part_may_be_its_text_alone(server):
    parts = ["A", {"type": "text", "text": "B"}, "C"]
    reply = await server.post(ask(parts, max_tokens=1, return_token_ids=True), CHAT)
    assert reply.body["prompt_token_ids"] == byte_ids("A\nB\nC")


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
async def test_a_message_without_content_is_an_empty_one(start, role):
    server = await start(template="{% for m in messages %}{{ m.role ~ m['content'] }};{% endfor %}")
    messages = [{"role": role}, {"role": role, "content": None}, {"role": "user", "content": "A"}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    reply = await server.post(body, CHAT)
    assert reply.body["prompt_token_ids"] == byte_ids(f"{role};{role};userA;")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_told_once_beside_all_answers(server, stream):
    more = {"return_token_ids": True, "prompt_logprobs": 0, "stream": stream, "n": 2}
    if stream:
        more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    reply = await server.post(ask("ABC", max_tokens=2, **more), CHAT)
    first, *others = reply.events if stream else [reply.body]
    assert first["prompt_token_ids"] == byte_ids("ABC")
    assert [place and len(place) for place in first["prompt_logprobs"]] == [None, 1, 1]
    assert first["usage"]["prompt_tokens"] == 3
    assert not any("prompt_token_ids" in e or "prompt_logprobs" in e for e in others)
    choices = [choice for event in (first, *others) for choice in event["choices"]]
    assert not any("prompt_token_ids" in c or "prompt_logprobs" in c for c in choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprob_bytes_rebuild_a_character(start, stream):
    server = await start(emoji=True)
    body = ask("x", max_tokens=4, logprobs=True, top_logprobs=1, stream=stream)
    reply = await server.post(body, CHAT)
    if stream:
        found = [e["choices"][0]["logprobs"] for e in reply.events]
        entries = [entry for lists in found if lists for entry in lists["content"]]
    else:
        entries = reply.body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in MELT.encode()]
    assert [e["top_logprobs"][0]["bytes"] for e in entries] == [[b] for b in MELT.encode()]
    assert entries[0]["token"] == "bytes:\\xf0"
    assert entries[0]["logprob"] == pytest.approx(-0.661)


@pytest.mark.parametrize("num_top", [0, 1, 3])
async def test_as_many_alternatives_as_were_asked(server, num_top):
    body = ask("ABC", max_tokens=2, logprobs=True, top_logprobs=num_top)
    entries = (await server.post(body, CHAT)).body["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [num_top] * 2
    if num_top > 1:
        assert [top["token"] for top in entries[0]["top_logprobs"]][:2] == ["D", "E"]


async def test_an_answer_may_fill_the_context(start):
    server = await start(max_len=64)
    reply = await server.post(ask("ABC", ignore_eos=True), CHAT)
    assert reply.body["usage"]["total_tokens"] == 64
    assert (await server.post(ask("ABC", max_completion_tokens=2), CHAT)).text == "DE"


async def test_a_template_with_bos_gives_one_bos_everywhere(start):
    template = "{{ bos_token }}{{ messages[-1]['content'] }}"
    server = await start(adds_bos=True, template=template)
    want = [BOS, *byte_ids("ABC")]
    chat = await server.post(ask("ABC", max_tokens=1, return_token_ids=True), CHAT)
    assert chat.body["prompt_token_ids"] == want
    assert chat.body["usage"]["prompt_tokens"] == 4
    assert (await server.post(ask("ABC"), "/tokenize")).body["tokens"] == want
    assert (await server.post({"prompt": "ABC"}, "/tokenize")).body["tokens"] == want


async def test_calls_of_earlier_turns_reach_the_template_as_objects(start):
    template = "{{ messages[0].tool_calls[0].function.arguments.k }}"
    server = await start(template=template)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"k": "KLM"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = await server.post({"messages": messages, "max_tokens": 1}, CHAT)
    assert reply.text == "N"


async def test_a_message_can_be_continued(start):
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    server = await start(template=template)
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "KLM"}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert (await server.post(body, CHAT)).text == "N"


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"n": 2}])
async def test_an_echo_puts_the_last_turn_of_the_assistant_before_the_answer(start, more):
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    server = await start(template=template)
    parts = ["K", {"type": "text", "text": "LM"}]
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": parts}]
    body = {"messages": messages, "max_tokens": 2, "continue_final_message": True} | more
    told = [c["message"]["content"] for c in (await server.post(body, CHAT)).body["choices"]]
    assert told == ["NO"] * more.get("n", 1)
    echo = body | {"echo": True}
    told = [c["message"]["content"] for c in (await server.post(echo, CHAT)).body["choices"]]
    assert told == ["K\nLMNO"] * more.get("n", 1)
    stream = await server.post(echo | {"stream": True}, CHAT)
    assert "".join(stream.texts) == "K\nLMNO"
    mine = {"messages": messages[:1], "echo": True, "max_tokens": 2}
    assert (await server.post(mine, CHAT)).text == "}~"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_template_wrote_is_told_where_wanted(start, stream):
    server = await start(template="[{{ messages[-1]['content'] }}]")
    body = ask("ABC", max_tokens=1, stream=stream)
    for more, text in (({}, "[ABC]"), ({"truncate_prompt_tokens": 2}, "[ABC]")):
        wanted = await server.post(body | more | {"return_prompt_text": True}, CHAT)
        first, *others = wanted.events if stream else [wanted.body]
        assert first["prompt_text"] == text
        assert not any("prompt_text" in event for event in others)
    plain = await server.post(body, CHAT)
    assert b"prompt_text" not in plain.raw


async def test_special_tokens_are_put_round_what_the_template_wrote_where_wanted(start):
    server = await start(adds_bos=True)
    for more, before in (({}, []), ({"add_special_tokens": True}, [BOS])):
        body = ask("ABC", max_tokens=1, return_token_ids=True) | more
        want = [*before, *byte_ids("ABC")]
        assert (await server.post(body, CHAT)).body["prompt_token_ids"] == want
        assert (await server.post(ask("ABC") | more, "/tokenize")).body["tokens"] == want


async def test_template_keywords_reach_the_template(start):
    server = await start(template="{{ messages[0].content }}{{ extra }}")
    body = ask("A", max_tokens=1, chat_template_kwargs={"extra": "B"})
    assert (await server.post(body, CHAT)).text == "C"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content"),
        ({"messages": [{"role": "a", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "x"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(server, more, param):
    reply = await server.post(ask("ABC") | more, CHAT)
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_a_model_without_a_template_says_so(start):
    server = await start(template=None)
    reply = await server.post(ask("ABC"), CHAT)
    assert reply.status == 400
    assert "no chat template" in reply.error["message"]


async def test_a_refusal_of_the_template_is_the_clients(start):
    server = await start(template="{{ raise_exception('roles must alternate') }}")
    reply = await server.post(ask("ABC"), CHAT)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "roles must alternate" in reply.error["message"]
