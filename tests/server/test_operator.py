"""What operators and gateways use: origins, prefixes, metrics apart, aborts, the document, logs."""

import asyncio
import json
import logging
import time

import msgspec
import pytest

from server.app import create_metrics_app
from server.listener import Listener
from server.openapi import BODIES
from server.state import ServerLimits
from tests.server.conftest import CHAT, COMPLETIONS
from tests.support.models import byte_ids

GENERATE = "/inference/v1/generate"
FOREVER = {"prompt": "ABC", "max_tokens": 1900, "ignore_eos": True}


async def until(claim, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():
            await asyncio.sleep(0.005)


async def test_pages_of_allowed_origins_may_call_and_no_others(start):
    limits = ServerLimits(allowed_origins=("https://a.example",))
    server = await start(api_keys=("sk-one",), limits=limits)
    ask = {"Access-Control-Request-Method": "POST"}
    allowed, other = {"Origin": "https://a.example"}, {"Origin": "https://b.example"}
    reply = await server.send("OPTIONS", COMPLETIONS, headers=ask | allowed)
    assert (reply.status, reply.raw) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    assert "Authorization" in reply.headers["access-control-allow-headers"]
    for headers in (ask | other, ask, allowed):
        reply = await server.send("OPTIONS", COMPLETIONS, headers=headers)
        assert reply.status == 401
    refused = await server.post({"prompt": "ABC"}, headers=allowed)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in (await server.get("/health", headers=other)).headers


async def test_any_origin_by_a_star_and_none_by_default(start):
    server = await start(limits=ServerLimits(allowed_origins=("*",)))
    origin = {"Origin": "https://b.example"}
    stream = await server.post({"prompt": "A", "max_tokens": 2, "stream": True}, headers=origin)
    assert stream.headers["access-control-allow-origin"] == "*"
    plain = await start()
    reply = await plain.get("/health", headers=origin)
    assert "access-control-allow-origin" not in reply.headers


async def test_a_root_path_is_answered_with_and_without(start):
    server = await start(api_keys=("sk-one",), limits=ServerLimits(root_path="/llm"))
    key = {"Authorization": "Bearer sk-one"}
    for prefix in ("", "/llm"):
        reply = await server.post(
            {"prompt": "ABC", "max_tokens": 2, "temperature": 0},
            prefix + COMPLETIONS,
            headers=key,
        )
        assert reply.text == "DE"
        assert (await server.get(f"{prefix}/health")).status == 200
        assert (await server.get(f"{prefix}/metrics")).status == 401
    assert (await server.get("/llm/llm/health", headers=key)).status == 404
    document = (await server.get("/openapi.json", headers=key)).body
    assert document["servers"] == [{"url": "/llm"}]
    assert not [path for path in document["paths"] if path.startswith("/llm")]


async def test_the_document_has_every_route_and_the_fields_that_are_read(server):
    document = (await server.get("/openapi.json")).body
    assert document["openapi"].startswith("3.")
    shown = {
        (method.upper(), path, operation["operationId"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    routes = {
        (route.method, route.resource.canonical, route.resource.name)
        for route in server.app.router.routes()
        if route.method != "HEAD"
    }
    assert shown == routes
    schemas = document["components"]["schemas"]
    for kind in BODIES.values():
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
    assert document["paths"]["/health"]["get"]["security"] == []
    assert document["paths"]["/metrics"]["get"]["security"] == [{"key": []}]
    text = json.dumps(document)
    for reference in (part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]):
        assert reference in schemas


async def test_the_metrics_port_serves_metrics_and_nothing_else(start):
    import socket

    import aiohttp

    server = await start(api_keys=("sk-one",))
    listening = socket.create_server(("127.0.0.1", 0))
    listener = await Listener.start(create_metrics_app(server.state), listening)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as response:
            assert "vllm:num_requests_running" in await response.text()
        async with session.post(url + COMPLETIONS, json={"prompt": "A"}) as response:
            assert response.status == 404
    await listener.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_in_and_out(server, stream):
    body = {
        "token_ids": byte_ids("ABC"),
        "sampling_params": {"temperature": 0, "max_tokens": 3, "logprobs": 1},
        "request_id": "mine",
        "stream": stream,
    }
    reply = await server.post(body, GENERATE)
    choices = [c for event in reply.events for c in event["choices"]] if stream else (
        reply.body["choices"])  # fmt: skip
    assert [t for c in choices for t in c["token_ids"]] == byte_ids("DEF")
    assert choices[-1]["finish_reason"] == "length"
    entries = [e for c in choices for e in c["logprobs"]["content"]]
    assert [e["logprob"] for e in entries] == pytest.approx([-0.661] * 3)
    if not stream:
        assert reply.body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": [512]}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1] * 3000}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": "x"}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
    ],
)
async def test_bad_token_bodies_are_refused(server, body, param):
    reply = await server.post(body, GENERATE)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_can_be_ended_by_its_id(server, stream):
    server.engine.before_step = lambda step: time.sleep(0.002)
    task = asyncio.create_task(server.post(FOREVER | {"stream": stream, "request_id": "mine"}))
    await until(lambda: server.engine.num_steps > 3)
    path = "/inference/v1/abort_requests"
    assert (await server.post({"request_ids": ["other"]}, path)).body == {"aborted": []}
    assert len((await server.post({"request_ids": ["mine"]}, path)).body["aborted"]) == 1
    reply = await task
    assert reply.status == 200
    last = (reply.events[-1] if stream else reply.body)["choices"][0]
    assert last["finish_reason"] == "abort"
    text = "".join(reply.texts) if stream else reply.text
    assert text.startswith("DEF")
    await until(lambda: not server.engine.has_work)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "logprobs": 1}])
async def test_a_request_may_set_its_own_time(server, more):
    server.engine.before_step = lambda step: time.sleep(0.002)
    begun = time.monotonic()
    reply = await server.post(FOREVER | more | {"timeout_s": 0.2})
    assert 0.15 < time.monotonic() - begun < 3
    if more:
        assert (reply.status, reply.events[-1]["error"]["type"]) == (200, "timeout_error")
    else:
        assert (reply.status, reply.error["type"]) == (408, "timeout_error")
    await until(lambda: not server.engine.has_work)
    assert (await server.post({"prompt": "ABC", "max_tokens": 2, "timeout_s": 60})).text == "DE"


@pytest.mark.parametrize("seconds", [0, -1, 1e9])
async def test_times_out_of_range_are_refused(server, seconds):
    reply = await server.post({"prompt": "A", "timeout_s": seconds})
    assert (reply.status, reply.error["param"]) == (400, "timeout_s")


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "YZ"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "AB"),
        ({"truncate_prompt_tokens": 60}, None),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, 60),
    ],
)
async def test_a_prompt_may_be_cut_to_what_is_kept(start, more, kept):
    server = await start(max_len=64)
    text = "A" * 5 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * (4 if kept == 60 else 1)
    if more.get("truncation_side") == "right":
        text = text[5:]
    body = {"max_tokens": 1, "ignore_eos": True} | more
    for reply in (
        await server.post(body | {"prompt": text, "echo": True}),
        await server.post(body | {"messages": [{"role": "user", "content": text}]}, CHAT),
    ):
        num = len(text) if kept is None else kept if isinstance(kept, int) else 2
        assert reply.body["usage"]["prompt_tokens"] == num
        ids = server.engine.last_request.prompt_token_ids
        want = byte_ids(text[-num:] if kept != "AB" else text[:2])
        assert list(ids) == want


async def test_prompt_logprobs_come_once_in_a_stream(server):
    body = {"max_tokens": 3, "prompt_logprobs": 1, "stream": True}
    for path, more in (
        (COMPLETIONS, {"prompt": "ABC"}),
        (CHAT, {"messages": [{"role": "user", "content": "ABC"}]}),
    ):
        reply = await server.post(body | more, path)
        places = [place for event in reply.events for place in (event, *event["choices"])]
        found = [place["prompt_logprobs"] for place in places if "prompt_logprobs" in place]
        assert len(found) == 1
        assert found[0][0] is None
        assert len(found[0]) == 3


async def test_usage_can_be_forced_on_every_stream(start):
    server = await start(limits=ServerLimits(forces_usage=True))
    reply = await server.post({"prompt": "ABC", "max_tokens": 2, "stream": True})
    assert reply.events[-1]["usage"]["total_tokens"] == 5
    assert "usage" in (await server.post({"prompt": "ABC"})).body


async def test_the_access_log_is_one_json_line_whatever_the_path(start, caplog):
    server = await start(api_keys=("sk-one",))
    key = {"Authorization": "Bearer sk-one", "X-Request-Id": "r1"}
    with caplog.at_level(logging.INFO, "server.access"):
        await server.post({"prompt": "ABC", "max_tokens": 2}, headers=key)
        await server.get('/x%0A"forged":1%00')
        await server.get("/health")
    lines = [r.getMessage() for r in caplog.records if r.name == "server.access"]
    first, second = map(json.loads, lines)
    assert (first["route"], first["status"], first["request_id"]) == (COMPLETIONS, 200, "r1")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (3, 2)
    assert first["key"] != "sk-one"
    assert (second["route"], second["status"]) == ("none", 401)
    assert all("\n" not in line for line in lines)


async def test_what_goes_to_the_engine_can_be_logged(start, caplog):
    limits = ServerLimits(is_logging_requests=True, max_log_len=5)
    server = await start(limits=limits)

    async def logged(level: str, body: dict, path: str = COMPLETIONS) -> dict:
        caplog.clear()
        with caplog.at_level(level, "server.requests"):
            await server.post(body, path)
        (line,) = [r.getMessage() for r in caplog.records if r.name == "server.requests"]
        return msgspec.json.decode(line)

    body = {"prompt": ['A\nBC"DEF', "X"], "max_tokens": 2, "stop": ["zz"], "request_id": "mine"}
    line = await logged("INFO", body)
    assert (line["request_id"], line["kind"], line["num_prompts"]) == ("mine", "completions", 2)
    assert line["params"] == {"temperature": 0, "max_tokens": 2, "stop": ["zz"]}
    assert "prompts" not in line
    assert (await logged("DEBUG", body))["prompts"] == ['A\nBC"', "X"]
    chat = {"messages": [{"role": "user", "content": "ABCDEFGH"}], "max_tokens": 2}
    (prompt,) = (await logged("DEBUG", chat, CHAT))["prompts"]
    assert (prompt["prompt"], len(prompt["prompt_token_ids"])) == ("ABCDE", 5)


async def test_the_tokenizer_is_told_where_the_operator_wants_it(start):
    assert (await (await start()).get("/tokenizer_info")).status == 404
    server = await start(limits=ServerLimits(tells_tokenizer=True), template="{{ eos_token }}!")
    told = (await server.get("/tokenizer_info")).body
    assert told["eos_token"] == server.llm.tokenizer.special_tokens["eos_token"]
    assert told["chat_template"] == "{{ eos_token }}!"
    assert (told["unk_token"], told["vocab_size"]) == (None, server.llm.tokenizer.vocab_size)


async def test_a_second_head_that_drips_is_cut_too(start):
    server = await start(limits=ServerLimits(header_timeout_s=0.3))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[-1]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" in await reader.readline()
    await asyncio.sleep(0.5)  # a connection may rest between requests
    begun = time.monotonic()

    async def drip() -> None:
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    with pytest.raises(ConnectionError):
        await drip()
    assert time.monotonic() - begun < 1.5
    writer.close()


async def test_a_trace_that_cannot_be_written_ends_no_engine(start, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    server = await start(limits=ServerLimits(profile_dir=str(tmp_path / "file" / "traces")))
    reply = await server.send("POST", "/start_profile")
    assert (reply.status, "no trace can be written" in reply.error["message"]) == (400, True)

    def fail(*_):
        raise RuntimeError("No space left on device")

    server = await start(limits=ServerLimits(profile_dir=str(tmp_path / "traces")))
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: None)
    monkeypatch.setattr("jax.profiler.stop_trace", fail)
    assert (await server.send("POST", "/start_profile")).status == 200
    reply = await server.send("POST", "/stop_profile")
    assert (reply.status, "No space left" in reply.error["message"]) == (400, True)
    assert (await server.post({"prompt": "ABC", "max_tokens": 3})).text == "DEF"


async def test_profiles_need_a_folder(server):
    reply = await server.send("POST", "/start_profile")
    assert reply.status == 400
    assert "--profile-dir" in reply.error["message"]
    assert (await server.send("POST", "/stop_profile")).status == 400
    assert (await server.send("POST", "/sleep?level=3")).error["param"] == "level"
    assert (await server.send("POST", "/wake_up?tags=weights&tags=foo")).error["param"] == "tags"
    assert (await server.send("POST", "/wake_up?tags=weights&tags=kv_cache")).status == 200
    assert (await server.get("/is_sleeping")).body == {"is_sleeping": False}
    assert (await server.send("POST", "/reset_prefix_cache")).status == 200


async def test_a_control_that_breaks_the_engine_is_answered(server):
    def broken() -> None:
        raise RuntimeError("broken on purpose")

    server.engine.scheduler.reset_prefix_cache = broken
    reply = await asyncio.wait_for(server.send("POST", "/reset_prefix_cache"), 10)
    assert reply.status == 500
    await until(lambda: not server.llm.is_running)
