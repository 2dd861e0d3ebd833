"""Streams, clients that leave, engines that fail, and what the server tells of itself."""

import asyncio
import io
import threading
import time

import msgspec
import openai
import pytest

from jaxpaged import __version__
from server.state import ServerLimits
from tests.server.conftest import CHAT, COMPLETIONS
from tests.support.models import byte_ids

FOREVER = {"prompt": "ABC", "max_tokens": 1500, "ignore_eos": True}


def slow_steps(seconds: float):
    return lambda step: time.sleep(seconds)


async def until(claim, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(server, stream):
    server.engine.before_step = slow_steps(0.002)
    task = asyncio.create_task(server.post(FOREVER | {"stream": stream}))
    await until(lambda: server.engine.num_steps > 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    left_at = server.engine.num_steps
    await until(lambda: not server.engine.has_work, 1.0)
    assert server.engine.num_aborted == 1
    assert server.engine.num_steps < 700
    assert server.engine.num_steps - left_at < 100
    await until(lambda: server.llm.num_open_requests == 0)
    assert server.state.num_working == 0
    assert server.state.open_ids == set()


async def test_a_client_that_leaves_aborts_all_its_prompts(server):
    server.engine.before_step = slow_steps(0.002)
    body = FOREVER | {"prompt": ["ABC", "KLM"], "n": 2, "stream": True}
    task = asyncio.create_task(server.post(body))
    await until(lambda: server.engine.num_steps > 3)
    task.cancel()
    await until(lambda: not server.engine.has_work, 1.0)
    assert server.engine.num_aborted == 2


async def test_a_reader_that_stops_is_given_up(start):
    server = await start(limits=ServerLimits(write_timeout_s=0.3))
    _, writer = await asyncio.open_connection(
        "127.0.0.1", int(server.url.split(":")[-1]), limit=1024
    )
    body = b'{"prompt":"ABC","max_tokens":2000,"n":64,"stream":true,"ignore_eos":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await until(lambda: server.state.num_working == 1)
    await until(lambda: server.state.num_working == 0, 20.0)
    await until(lambda: not server.engine.has_work)
    writer.close()


async def test_two_requests_with_one_client_id_are_apart(server):
    headers = {"X-Request-Id": "same"}
    bodies = [{"prompt": p, "max_tokens": 30, "request_id": "same"} for p in ("ABC", "KLM")]
    first, second = await asyncio.gather(*[server.post(b, headers=headers) for b in bodies])
    assert first.text.startswith("DEF")
    assert second.text.startswith("NOP")
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    assert first.body["id"] != second.body["id"]


async def test_every_answer_has_an_id_in_its_head_where_the_operator_wants_it(start):
    server = await start(limits=ServerLimits(names_requests=True))
    named = (await server.get("/health", headers={"X-Request-Id": "mine"})).headers
    assert named["x-request-id"] == "mine"
    others = {(await server.get("/health")).headers["x-request-id"] for _ in range(2)}
    assert len(others) == 2


async def test_one_request_that_fails_harms_no_other(server):
    """Logits that are not finite end one request with a 500 or an error event."""
    real_step = server.engine.step

    def failing_step():

        events = real_step()
        bad = {a.request.request_id for a in server.engine._answers if a.token_ids[0] == 42}
        for request_id in bad:
            server.engine.abort(request_id)
        return [
            e._replace(finish_reason="error", error="not finite", token_ids=(), text="")
            if e.request_id in bad
            else e
            for e in events
        ]

    server.engine.step = failing_step
    good, bad, stream = await asyncio.gather(
        server.post({"prompt": "ABC", "max_tokens": 20}),
        server.post({"prompt": [42, 43], "max_tokens": 20}),
        server.post({"prompt": "ABC", "max_tokens": 20, "stream": True}),
    )
    assert good.text == "".join(stream.texts) == "DEFGHIJKLMNOPQRSTUVW"
    assert (bad.status, bad.error["message"]) == (500, "not finite")


async def test_a_dead_engine_answers_every_request_and_fails_health(server):
    go = threading.Event()

    def die(step: int) -> None:
        time.sleep(0.002)
        if go.is_set():
            raise RuntimeError("secret cause in /a/path")

    server.engine.before_step = die
    plain = asyncio.create_task(server.post(FOREVER))
    stream = asyncio.create_task(server.post(FOREVER | {"stream": True}))
    await until(lambda: server.engine.load_size == 2)
    both_at = server.engine.num_steps
    await until(lambda: server.engine.num_steps > both_at + 5)
    go.set()
    plain, stream = await plain, await stream
    assert (plain.status, plain.error["type"]) == (500, "server_error")
    assert stream.status == 200
    assert stream.events[-1]["error"]["type"] == "server_error"
    assert b"secret" not in plain.raw + stream.raw
    health = await server.get("/health")
    assert (health.status, health.body) == (503, {"status": "stopped"})
    assert (await server.get("/health/live")).status == 503
    assert (await server.post({"prompt": "ABC"})).status == 500


async def test_a_stalled_engine_fails_health_and_recovers(start):
    server = await start(limits=ServerLimits(stall_timeout_s=0.1))
    go = threading.Event()
    server.engine.before_step = lambda step: go.wait(10) if step == 3 else None
    task = asyncio.create_task(server.post({"prompt": "ABC", "max_tokens": 9}))
    await until(lambda: server.engine.num_steps == 3)
    await asyncio.sleep(0.15)
    health = await server.get("/health")
    assert (health.status, health.body) == (503, {"status": "stalled"})
    go.set()
    assert (await task).text == "DEFGHIJKL"
    assert (await server.get("/health")).status == 200


async def test_a_draining_server_finishes_and_takes_nothing_new(server):
    server.engine.before_step = slow_steps(0.001)
    body = {"prompt": "ABC", "max_tokens": 60, "stream": True}
    task = asyncio.create_task(server.post(body))
    await until(lambda: server.engine.num_steps > 3)
    server.state.is_draining = True
    refused = await server.post({"prompt": "ABC"})
    assert (refused.status, refused.error["type"]) == (503, "overloaded_error")
    assert int(refused.headers["retry-after"]) >= 1
    for path, status in (("/health", 503), ("/health/ready", 503), ("/health/live", 200)):
        assert (await server.get(path)).status == status
    assert await server.state.wait_until_idle(5.0)
    assert len("".join((await task).texts)) == 60


async def test_health_stays_quick_while_a_template_runs_wild(start):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    server = await start(template=endless)
    body = {"messages": [{"role": "user", "content": "x"}]}
    task = asyncio.create_task(server.post(body, CHAT))
    waits = []
    while not task.done():
        begun = time.monotonic()
        assert (await server.get("/health")).status == 200
        waits.append(time.monotonic() - begun)
        await asyncio.sleep(0.01)
    assert (await task).status == 400
    assert sorted(waits)[int(len(waits) * 0.98)] < 0.25


async def test_health_stays_quick_while_a_long_prompt_is_encoded(start):
    server = await start(max_len=2_000_000)
    body = msgspec.json.encode({"prompt": "naïve text " * 100_000, "max_tokens": 0})
    task = asyncio.create_task(server.send("POST", COMPLETIONS, data=io.BytesIO(body)))
    waits = []
    while not task.done():
        begun = time.monotonic()
        await server.get("/health")
        waits.append(time.monotonic() - begun)
        await asyncio.sleep(0.01)
    assert (await task).status == 200
    assert sorted(waits)[len(waits) // 2] < 0.1


async def test_models_tell_names_and_context(start):
    server = await start(names=("first", "org/second"), max_len=123)
    listed = (await server.get("/v1/models")).body["data"]
    assert [(m["id"], m["max_model_len"]) for m in listed] == [("first", 123), ("org/second", 123)]
    assert (await server.get("/v1/models/org/second")).body["id"] == "org/second"
    reply = await server.post({"prompt": "ABC", "max_tokens": 1, "model": "org/second"})
    assert reply.body["model"] == "org/second"
    server.llm.named_model = "org/of-the-hub"
    roots = [model["root"] for model in (await server.get("/v1/models")).body["data"]]
    assert roots == ["org/of-the-hub"] * 2


async def test_version_ping_and_load(server):
    assert (await server.get("/version")).body == {"version": __version__}
    assert (await server.get("/ping")).status == 200
    assert (await server.send("POST", "/ping")).status == 200
    assert (await server.get("/health")).raw == b""
    assert (await server.get("/load")).body == {"server_load": 0}


async def test_metrics_have_vllms_names_and_count_http(server):
    await server.post({"prompt": "ABC", "max_tokens": 7})
    await server.post({"prompt": "ABC", "n": 0})
    await server.get("/weird/path/by/a/client")
    text = (await server.get("/metrics")).raw.decode()
    label = '{engine="0",model_name="S"}'
    assert f"vllm:generation_tokens_total{label} 7.0" in text
    assert f"vllm:num_requests_running{label} 0.0" in text
    for status in ("2xx", "4xx"):
        labels = f'{{handler="/v1/completions",method="POST",status="{status}"}}'
        assert f"http_requests_total{labels} 1.0" in text
    assert "weird" not in text
    assert "vllm:iteration_tokens_total_count" in text


async def test_tokenize_and_detokenize_are_inverse(server):
    reply = await server.post({"prompt": "naïve 🫠", "return_token_strs": True}, "/tokenize")
    body = reply.body
    assert body["tokens"] == byte_ids("naïve 🫠")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 2048
    back = await server.post({"tokens": body["tokens"]}, "/detokenize")
    assert back.body == {"prompt": "naïve 🫠"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_bad_token_requests_are_refused(server, path, body, param):
    reply = await server.post(body, path)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_http_1_0_clients_get_a_stream_that_ends_with_the_connection(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[-1]))
    body = b'{"prompt":"ABC","max_tokens":2,"stream":true,"temperature":0}'
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in answer.lower()
    writer.close()


async def test_many_streams_at_once_are_all_whole(server):
    bodies = [{"prompt": p, "max_tokens": 40, "stream": True} for p in ("ABC", "KLM")] * 16
    replies = await asyncio.gather(*[server.post(body) for body in bodies])
    texts = {"".join(reply.texts)[:3] for reply in replies}
    assert texts == {"DEF", "NOP"}
    assert all(len("".join(reply.texts)) == 40 for reply in replies)


async def test_the_official_client_is_served(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    try:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["S"]
        done = await client.completions.create(
            model="S", prompt="ABC", max_tokens=3, temperature=0, logprobs=1
        )
        assert done.choices[0].text == "DEF"
        assert done.choices[0].logprobs.tokens == ["D", "E", "F"]
        messages = [{"role": "user", "content": "ABC"}]
        chat = await client.chat.completions.create(
            model="S", messages=messages, max_completion_tokens=3, temperature=0, logprobs=True
        )
        assert chat.choices[0].message.content == "DEF"
        assert chat.choices[0].logprobs.content[0].bytes == [68]
        stream = await client.chat.completions.create(
            model="S",
            messages=messages,
            max_tokens=3,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "DEF"
        assert chunks[-1].usage.total_tokens == 6
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="S", prompt="ABC", max_tokens=-1)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="ABC")
    finally:
        await client.close()


async def test_a_raw_stream_is_well_formed(server):
    reply = await server.send("POST", COMPLETIONS, json=FOREVER | {"max_tokens": 5, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    for event in reply.raw.split(b"\n\n")[:-1]:
        assert event.startswith(b"data: ")
        assert b"\n" not in event
