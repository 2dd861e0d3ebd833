"""What /v1/completions answers, plain and streamed."""

from typing import Any

import msgspec
import pytest

from jaxpaged.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from tests.server.conftest import CHAT, COMPLETIONS
from tests.support.models import BOS, byte_ids

MELT = "\U0001fae0"
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}

SAY = [{"role": "user", "content": "ABC"}]
NULLABLE: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    (COMPLETIONS, CompletionRequest, {"prompt": "ABC", "seed": 7}),
    (CHAT, ChatRequest, {"messages": SAY, "max_tokens": 4, "seed": 7}),
    ("/tokenize", TokenizeRequest, {"prompt": "ABC"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [32]}),
    (
        "/inference/v1/generate",
        GenerateRequest,
        {"token_ids": [32], "sampling_params": {"seed": 7}},
    ),
]


async def test_a_prompt_is_continued_with_usage(server):
    reply = await server.post({"prompt": "ABC", "max_tokens": 5})
    assert reply.status == 200
    body = reply.body
    assert body["object"] == "text_completion"
    assert body["model"] == "S"
    assert body["id"].startswith("cmpl-")
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("DEFGH", "length", 0)
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 5, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ABC", ["DE"]),
        (["ABC", "KLM"], ["DE", "NO"]),
        (byte_ids("ABC"), ["DE"]),
        ([byte_ids("ABC"), byte_ids("KLM")], ["DE", "NO"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_text_and_token_ids_one_or_several(server, prompt, texts, stream):
    reply = await server.post({"prompt": prompt, "max_tokens": 2, "stream": stream})
    assert reply.status == 200
    if not stream:
        assert [choice["text"] for choice in reply.body["choices"]] == texts
        return
    joined = dict.fromkeys(range(len(texts)), "")
    for event in reply.events:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    assert list(joined.values()) == texts


async def test_n_answers_of_several_prompts_are_numbered_prompt_by_prompt(server):
    body = {"prompt": ["ABC", "KLM"], "n": 3, "max_tokens": 4, "temperature": 1, "seed": 7}
    first, again = [await server.post(body) for _ in range(2)]
    texts = [choice["text"] for choice in first.body["choices"]]
    assert [choice["index"] for choice in first.body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert all(text[0] in "DE" for text in texts[:3])
    assert all(text[0] in "NO" for text in texts[3:])
    assert [choice["text"] for choice in again.body["choices"]] == texts
    assert first.body["usage"]["prompt_tokens"] == 6
    assert first.body["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("route", NULLABLE, ids=lambda route: route[0])
async def test_nulls_are_the_same_as_leaving_out(server, route):
    path, schema, body = route
    needed = {field.name for field in msgspec.structs.fields(schema) if field.required}
    nulls = dict.fromkeys(set(schema.__struct_fields__) - needed - body.keys())
    assert nulls
    bodies = (body, body | nulls)
    plain, with_nulls = [await server.send("POST", path, json=each) for each in bodies]
    assert (plain.status, with_nulls.status) == (200, 200), with_nulls.raw
    assert _told(plain) == _told(with_nulls)


def _told(reply) -> dict:
    return {name: value for name, value in reply.body.items() if name not in ("id", "created")}


async def test_defaults_of_the_model_fill_what_is_left_out(start):
    server = await start(default_sampling={"max_tokens": 3, "stop": ["F"]})
    assert (await server.post({"prompt": "ABC"})).text == "DE"
    assert (await server.post({"prompt": "ABC", "stop": []})).text == "DEF"
    assert (await server.post({"prompt": "ABC", "stop": [], "max_tokens": 1})).text == "D"


async def test_a_split_character_is_streamed_whole(start):
    server = await start(emoji=True)
    reply = await server.post({"prompt": "x", "max_tokens": 5} | WITH_USAGE)
    assert "".join(reply.texts) == MELT + "y"
    assert all("\ufffd" not in text for text in reply.texts)
    assert reply.events[-1]["usage"]["completion_tokens"] == 5
    assert (await server.post({"prompt": "x", "max_tokens": 5})).text == MELT + "y"


async def test_no_chunk_shows_the_beginning_of_a_stop_string(server):
    body = {"prompt": "ABC", "stop": ["FGH"], "max_tokens": 10}
    plain, stream = await server.post(body), await server.post(body | WITH_USAGE)
    assert plain.text == "".join(stream.texts) == "DE"
    assert all("F" not in text for text in stream.texts)
    choice = plain.body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "FGH")
    assert stream.events[-1]["usage"] == plain.body["usage"]


@pytest.mark.parametrize(
    ("stop", "text", "reason"), [(["E"], "DEFGHIJK", "length"), (["J"], "DEFGHI", "stop")]
)
async def test_stop_strings_wait_for_min_tokens(server, stop, text, reason):
    body = {"prompt": "ABC", "min_tokens": 5, "max_tokens": 8, "stop": stop}
    reply = await server.post(body)
    assert (reply.text, reply.body["choices"][0]["finish_reason"]) == (text, reason)


async def test_a_stop_token_ends_the_answer_and_is_named(server):
    body = {"prompt": "ABC", "stop_token_ids": byte_ids("F"), "max_tokens": 9}
    reply = await server.post(body)
    choice = reply.body["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("DE", byte_ids("F")[0])


async def test_echo_scores_the_prompt(server):
    reply = await server.post({"prompt": "ABC", "echo": True, "logprobs": 2, "max_tokens": 1})
    choice = reply.body["choices"][0]
    assert choice["text"] == "ABCD"
    lists = choice["logprobs"]
    assert lists["tokens"] == list("ABCD")
    assert lists["token_logprobs"] == [None, -0.661, -0.661, -0.661]
    assert lists["text_offset"] == [0, 1, 2, 3]
    assert lists["top_logprobs"] == [None, *({a: -0.661, b: -1.661} for a, b in ("BC", "CD", "DE"))]


async def test_echo_without_new_tokens_scores_only(server):
    reply = await server.post({"prompt": "ABC", "echo": True, "logprobs": 1, "max_tokens": 0})
    choice = reply.body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ABC", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert reply.body["usage"]["completion_tokens"] == 0


async def test_streams_carry_the_same_logprobs_as_plain_answers(start):
    server = await start(emoji=True)
    body = {"prompt": "x", "max_tokens": 6, "logprobs": 2, "echo": True}
    plain, stream = await server.post(body), await server.post(body | {"stream": True})
    lists = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
    for event in stream.events:
        for name, values in lists.items():
            values += event["choices"][0]["logprobs"][name]
    assert lists == plain.body["choices"][0]["logprobs"]
    assert lists["tokens"][:3] == ["x", "bytes:\\xf0", "bytes:\\x9f"]
    assert lists["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert "".join(stream.texts) == plain.text == f"x{MELT}yx"


async def test_echo_of_token_ids_shows_their_text(server):
    reply = await server.post({"prompt": byte_ids("ABC"), "echo": True, "max_tokens": 1})
    assert reply.text == "ABCD"


async def test_token_ids_come_back_on_request(server):
    body = {"prompt": "ABC", "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
    body |= {"return_tokens_as_token_ids": True}
    choice = (await server.post(body)).body["choices"][0]
    assert choice["token_ids"] == byte_ids("DE")
    assert choice["prompt_token_ids"] == byte_ids("ABC")
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in byte_ids("DE")]
    stream = await server.post(body | {"stream": True})
    streamed = [token for e in stream.events for token in e["choices"][0]["token_ids"]]
    assert streamed == byte_ids("DE")


async def test_prompt_logprobs_are_vllms(server):
    reply = await server.post({"prompt": "ABC", "max_tokens": 1, "prompt_logprobs": 1})
    places = reply.body["choices"][0]["prompt_logprobs"]
    assert places[0] is None
    assert places[1] == {"33": {"logprob": -0.661, "rank": 1, "decoded_token": "B"}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "more", [{}, {"n": 3}, {"stop": ["F"]}, {"use_beam_search": True, "n": 2}, {"max_tokens": 0}]
)
async def test_usage_in_a_stream_is_that_of_the_plain_answer(server, path, more):
    body = {"prompt": "ABC"} if path == COMPLETIONS else dict(NULLABLE[1][2])
    body = body | {"max_tokens": 4, "ignore_eos": True} | more
    if more.get("max_tokens") == 0:
        body["echo"] = True
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    plain, stream = await server.post(body, path), await server.post(body | usage, path)
    assert stream.events[-1]["choices"] == []
    assert stream.events[-1]["usage"] == plain.body["usage"]
    assert all(event["usage"] is None for event in stream.events[:-1])
    without = await server.post(body | {"stream": True}, path)
    assert all("usage" not in event and event["choices"] for event in without.events)


async def test_usage_comes_last_and_only_on_request(server):
    body = {"prompt": "ABC", "max_tokens": 3}
    *earlier, last = (await server.post(body | WITH_USAGE)).events
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 6
    assert [event["usage"] for event in earlier] == [None] * len(earlier)
    without = (await server.post(body | {"stream": True})).events
    assert all(event["choices"] and "usage" not in event for event in without)


async def test_usage_may_come_with_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ABC", "max_tokens": 3, "stream": True, "stream_options": options}
    counts = [e["usage"]["completion_tokens"] for e in (await server.post(body)).events]
    assert counts == sorted(counts)
    assert counts[-1] == 3


async def test_bias_bans_a_token(server):
    body = {"prompt": "ABC", "max_tokens": 1}
    assert (await server.post(body | {"logit_bias": {"35": -100}})).text == "E"
    assert (await server.post(body | {"logit_bias": {}})).text == "D"


async def test_plain_completions_keep_one_automatic_bos(start):
    server = await start(adds_bos=True)
    reply = await server.post({"prompt": "ABC", "max_tokens": 1, "return_token_ids": True})
    assert reply.body["choices"][0]["prompt_token_ids"] == [BOS, *byte_ids("ABC")]
    assert reply.body["usage"]["prompt_tokens"] == 4


async def test_prompt_and_answer_must_fit_the_context(start):
    server = await start(max_len=256)
    statuses = {}
    one, two = {"max_tokens": 1}, {"max_tokens": 2}
    score = {"max_tokens": 0, "echo": True}
    for length, more in ((256, one), (255, one), (255, two), (256, score)):
        reply = await server.post({"prompt": [1] * length} | more)
        statuses[length, more["max_tokens"]] = reply.status
        if reply.status == 400:
            assert str(length) in reply.error["message"]
            assert "256" in reply.error["message"]
    assert statuses == {(256, 1): 400, (255, 1): 200, (255, 2): 400, (256, 0): 200}


@pytest.mark.parametrize(("more", "num"), [({}, 4), ({"add_special_tokens": False}, 3)])
async def test_a_completion_may_have_no_special_tokens_round_its_prompt(start, more, num):
    server = await start(adds_bos=True)
    for prompt in ("ABC", ["ABC"]):
        reply = await server.post({"prompt": prompt, "max_tokens": 2, "echo": True} | more)
        assert (reply.text, reply.body["usage"]["prompt_tokens"]) == ("ABCDE", num)
    ids = await server.post({"prompt": [65, 66], "max_tokens": 1} | more)
    assert ids.body["usage"]["prompt_tokens"] == 2
    cut = await server.post({"prompt": "ABC", "max_tokens": 1, "truncate_prompt_tokens": 2} | more)
    assert cut.body["usage"]["prompt_tokens"] == 2
    empty = await server.post({"prompt": "", "max_tokens": 1} | more)
    assert empty.status == (400 if more else 200)
