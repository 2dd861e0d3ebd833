"""Everything that must be refused: with the right status, in one shape, and without harm."""

import asyncio
import gzip
import json

import pytest

from server.state import ServerLimits
from tests.server.conftest import CHAT, COMPLETIONS

BAD_FIELDS = [
    *[({"prompt": prompt}, "prompt") for prompt in (
        [-1], [512], [[-1]], [2**63], [2**70], [1.5], [True], [None], [[True]], [], [[]], "", 7, {},
        None, ["a", 1], [[1], "a"], ["a", []],
    )],
    *[({"stop": stop}, "stop") for stop in ([""], "", ["X", ""], [1], 3, ["x"] * 17)],
    *[({"logit_bias": bias}, "logit_bias") for bias in (
        {"512": 1}, {"-1": 1}, {"x": 1}, {"35": 101}, {"1e3": 1}, {"": 1}, {str(2**70): 1},
        {"--5": 1},
    )],
    *[({"stop_token_ids": [i]}, "stop_token_ids") for i in (512, -1, 2**31, 2**63, 2**64)],
    ({"allowed_token_ids": [512]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": 10**9}, "min_tokens"),
    ({"min_tokens": 10**9, "max_tokens": None}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0.7"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"use_beam_search": True, "n": 11}, "n"),
    ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
    ({"use_beam_search": True, "stop": ["x"]}, "stop"),
    ({"use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"guided_json": {}}, "guided_json"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["long"]}, "max_tokens": 3}, "max_tokens"),
    ({"response_format": "text"}, "response_format"),
    ({"stream": "yes"}, "stream"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"logits_processors": ["nothing"]}, "logits_processors"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_a_400_that_names_it(server, fields, param, stream):
    body = {"prompt": "ABC", "max_tokens": 4} | ({"stream": True} if stream else {}) | fields
    reply = await server.post(body)
    assert reply.status == 400, reply.raw
    assert reply.headers["content-type"].startswith("application/json")
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"].split("[")[0].split(".")[0] == param
    assert "/" not in reply.error["message"].replace("GET /v1/models", "")
    assert (await server.post({"prompt": "ABC", "max_tokens": 3})).text == "DEF"


async def test_a_streamed_request_is_refused_like_a_plain_one(start):
    server = await start(max_len=256)
    body = {"prompt": [1] * 300}
    plain, stream = await server.post(body), await server.post(body | {"stream": True})
    assert (plain.status, stream.status) == (400, 400)
    assert plain.body == stream.body


async def test_options_of_a_stream_need_a_stream(server):
    reply = await server.post({"prompt": "ABC", "stream_options": {"include_usage": True}})
    assert (reply.status, reply.error["param"]) == (400, "stream_options")


async def test_prompts_times_n_is_bounded(server):
    reply = await server.post({"prompt": ["A"] * 100, "n": 100})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("num_tokens", "more", "said"),
    [
        (300, {}, "300 tokens and 16 more are asked for"),
        (300, {"max_tokens": 0, "echo": True}, "300 tokens"),
        (250, {"max_tokens": 9}, "250 tokens and 9 more are asked for"),
    ],
)
async def test_what_is_over_the_context_is_told_in_one_way(start, num_tokens, more, said):
    server = await start(max_len=256)
    as_ids = await server.post({"prompt": [33] * num_tokens} | more)
    assert (await server.post({"prompt": "A" * num_tokens} | more)).body == as_ids.body
    excess = num_tokens + more.get("max_tokens", 16) - 256
    less = ", or lower max_tokens to 6" if num_tokens < 256 else ""
    assert as_ids.error["message"] == (
        f"the prompt has {said}, over the model's maximum context length of 256 tokens: "
        f"shorten the prompt by {excess}{less}"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_of_several_refuses_all(server, stream):
    reply = await server.post({"prompt": [[32], [512]], "max_tokens": 2, "stream": stream})
    assert reply.status == 400
    assert server.engine.num_steps == 0
    too_long = [[32], [33] * 2045, [34], [35] * 2045]  # which is found one after another
    reply = await server.post({"prompt": too_long, "max_tokens": 9, "stream": stream})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    async with asyncio.timeout(5):
        while server.engine.has_work:
            await asyncio.sleep(0.01)
    assert server.llm.num_open_requests == 0


NO_JSON = [
    b"", b"{", b"{}x", b"\xff\xfe", b'{"prompt":"\xff"}', b'{"prompt":NaN}',
    b'{"prompt":"\\ud83e"}', b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]  # fmt: skip
NO_REQUEST = [
    b"[]", b'"x"', b"null", b"7", b'{"messages":[{"role":"user\\nx","content":7}],"prompt":1}',
]  # fmt: skip


@pytest.mark.parametrize("body", NO_JSON + NO_REQUEST)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_request_is_a_400(server, body, path):
    reply = await server.send("POST", path, data=body)
    assert reply.status == 400, reply.raw
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", [b"1e999", b"9" * 5000, b"-0.0e-999", b'"1"', b"[]", b"{}"])
async def test_odd_numbers_are_refused_or_read(server, number):
    for name in (b"temperature", b"max_tokens", b"seed", b"top_p"):
        body = b'{"prompt":"ABC","max_tokens":1,"%b":%b}' % (name, number)
        assert (await server.send("POST", COMPLETIONS, data=body)).status in (200, 400)


async def test_surrogates_made_by_escapes_are_refused_everywhere(server):
    text = b'"\\udc80"'
    bodies = [
        (COMPLETIONS, b'{"prompt":%b}' % text),
        (COMPLETIONS, b'{"prompt":"a","stop":%b}' % text),
        (CHAT, b'{"messages":[{"role":"user","content":%b}]}' % text),
        ("/tokenize", b'{"prompt":%b}' % text),
    ]
    for path, body in bodies:
        assert (await server.send("POST", path, data=body)).status == 400


async def test_the_last_of_two_equal_keys_counts(server):
    body = b'{"prompt":"ABC","max_tokens":1,"max_tokens":2,"temperature":0,"unknown":{"a":[1]}}'
    reply = await server.send("POST", COMPLETIONS, data=body)
    assert reply.text == "DE"


async def test_an_unknown_model_is_a_404(server):
    reply = await server.post({"prompt": "ABC", "model": "gpt-17\n"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert (await server.get("/v1/models/other")).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/models", 405),
        ("POST", "//v1/completions", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/V1/completions", 404),
    ],
)
async def test_wrong_paths_and_methods_have_the_same_shape(server, method, path, status):
    reply = await server.send(method, path)
    assert reply.status == status
    assert set(reply.error) == {"message", "type", "param", "code"}


async def test_too_large_a_body_is_refused_before_it_is_read(start):
    server = await start(limits=ServerLimits(max_request_bytes=1000))
    reply = await server.post({"prompt": "A" * 2000})
    assert reply.status == 413

    async def endless():
        for _ in range(1000):
            yield b"x" * 1000

    reply = await server.send("POST", COMPLETIONS, data=endless())
    assert reply.status == 413
    assert (await server.post({"prompt": "ABC", "max_tokens": 1})).text == "D"


async def test_compressed_bodies_are_refused(server):
    packed = gzip.compress(json.dumps({"prompt": "A" * 10**6}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    reply = await server.send("POST", COMPLETIONS, data=packed, headers=headers)
    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")


async def test_a_text_over_the_context_is_refused_without_encoding_it(start):
    server = await start(max_len=64)
    reply = await server.post({"prompt": "A" * 10_000})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "characters" in reply.error["message"]
    chat = await server.post({"messages": [{"role": "user", "content": "A" * 10_000}]}, CHAT)
    assert (chat.status, chat.error["param"]) == (400, "messages")
    chat = await server.post({"messages": [{"role": "user", "content": "A" * 65}]}, CHAT)
    assert (chat.status, chat.error["param"]) == (400, "messages")


async def test_a_full_queue_is_a_503_with_retry_after(start):
    server = await start(max_num_queued_reqs=1)
    server.engine.scheduler.num_waiting = 5
    reply = await server.post({"prompt": "ABC"})
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.error["type"] == "overloaded_error"
    told = (await server.get("/metrics")).raw.decode()
    labels = 'engine="0",model_name="S",reason="max_num_queued_reqs"'
    assert f"vllm:admission_rejections_total{{{labels}}} 1.0" in told
    assert told.count("# TYPE vllm:admission_rejections_total") == 1


async def test_user_bytes_in_a_message_stay_one_valid_json(server):
    reply = await server.post({"prompt": "ABC", "model": 'a"\n\x00é🫠' * 100})
    assert reply.status == 404
    assert len(reply.error["message"]) <= 1000


async def test_a_body_that_drips_is_cut_off(start):
    server = await start(limits=ServerLimits(body_timeout_s=0.2))

    async def dripping():
        for byte in b'{"prompt": "ABC"}':
            yield bytes([byte])
            await asyncio.sleep(0.1)

    reply = await server.send("POST", COMPLETIONS, data=dripping())
    assert reply.status == 408


async def test_a_connection_that_sends_no_head_is_cut_off(start):
    server = await start(limits=ServerLimits(header_timeout_s=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[-1]))
    writer.write(b"POST /v1/compl")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        async with asyncio.timeout(5):
            await reader.readexactly(1)
    writer.close()
    assert (await server.get("/health")).status == 200


async def test_huge_heads_are_refused(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[-1]))
    writer.write(b"GET /health HTTP/1.1\r\nX: " + b"a" * 2**20 + b"\r\n\r\n")
    status = await reader.readline()
    assert b" 400 " in status or b" 431 " in status
    writer.close()
