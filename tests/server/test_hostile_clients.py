"""What only an attacker or a broken proxy sends: told as all errors are, and nobody is harmed."""

import asyncio
import io

import msgspec
import pytest

from jaxpaged.openai.json_bounds import MAX_PARTS, MAX_VALUES, out_of_bounds
from server.state import ServerLimits
from tests.server.conftest import CHAT, COMPLETIONS, Running
from tests.server.test_slow_clients import ASK, connect

HOST = b"Host: x\r\n"
GET, POST = b"GET /health HTTP/1.1\r\n" + HOST, b"POST /v1/completions HTTP/1.1\r\n" + HOST
NO_HTTP = {
    "no request": b"hello\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n" + HOST + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a long path": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long header": GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
    "many headers": GET + b"".join(b"x%d: y\r\n" % i for i in range(300)) + b"\r\n",
    "a header without a colon": GET + b"bad header\r\n\r\n",
    "a folded header": GET + b"X: a\r\n b\r\n\r\n",
    "a control character": GET + b"X: a\x01b\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "two hosts": GET + HOST + b"\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a negative length": POST + b"Content-Length: -5\r\n\r\n",
    "another encoding": POST + b"Transfer-Encoding: foo\r\n\r\n",
    "no chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
    "a null in the path": b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method that is none": b"G@T /health HTTP/1.1\r\n" + HOST + b"\r\n",
}


async def ask(server: Running, data: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer to raw bytes, after which the connection ends."""
    reader, writer = await connect(server)
    writer.write(data)
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = next(line for line in head.splitlines() if line.startswith("content-length:"))
        body = await reader.readexactly(int(size.partition(":")[2]))
    writer.close()
    kind = next((line for line in head.splitlines() if line.startswith("content-type:")), "")
    return int(head.split()[1]), kind.partition(": ")[2], body


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_http_is_a_400_in_the_shape_of_all_errors(start, kind):
    server = await start(api_keys=("sk-1",))
    status, content_type, body = await ask(server, NO_HTTP[kind])
    assert (status, content_type) == (400, "application/json")
    error = msgspec.json.decode(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith("the request is no valid HTTP: ")
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 1000
    assert (await server.get("/health")).status == 200


async def test_an_expectation_that_is_not_known_is_refused_likewise(server):
    data = POST + b"Expect: 200-ok\r\nContent-Length: 2\r\n\r\n{}"
    status, content_type, body = await ask(server, data)
    assert (status, content_type) == (417, "application/json; charset=utf-8")
    assert "100-continue" in msgspec.json.decode(body)["error"]["message"]


JSON = {
    "NaN": (b'{"prompt":"ABC","temperature":NaN}', 400),
    "Infinity": (b'{"prompt":"ABC","temperature":-Infinity}', 400),
    "a number over all": (b'{"prompt":"ABC","temperature":1e999}', 400),
    "nesting": (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "nested objects": (b'{"prompt":"A","response_format":' + b'{"a":' * 50_000 + b"1", 400),
    "digits without end": (b'{"prompt":"ABC","max_tokens":' + b"9" * 100_000 + b"}", 400),
    "UTF-16": ('{"prompt":"ABC"}'.encode("utf-16"), 400),
    "no UTF-8": (b'{"prompt":"\xff\xfe"}', 400),
    "half a pair": (b'{"prompt":"\\ud800"}', 400),
    "two bodies": (b'{"prompt":"A"}{"prompt":"B"}', 400),
    "nothing": (b"", 400),
    "50,000 biases": (
        b'{"prompt":"A","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(50_000)) + b"}}",
        400,
    ),
    "a key twice": (b'{"prompt":"XYZ","prompt":"ABC","max_tokens":9,"max_tokens":3}', 200),
    "many keys": (
        b"{" + b"".join(b'"k%d":1,' % i for i in range(50_000)) + b'"prompt":"ABC","max_tokens":3}',
        200,
    ),
}


@pytest.mark.parametrize("kind", JSON)
async def test_json_that_no_client_writes_is_refused_or_read_as_others_read_it(server, kind):
    data, status = JSON[kind]
    headers = {"Content-Type": "application/json"}
    reply = await server.send("POST", COMPLETIONS, data=data, headers=headers)
    assert reply.status == status
    if status == 200:
        assert reply.text == "DEF"  # the last of two counts
    else:
        assert reply.error.keys() == {"message", "type", "param", "code"}
    assert (await server.post(ASK)).text == "DEF"


TREE, TEXT = b'{"a":' * 129 + b"1" + b"}" * 129, b"[" * 129
PLACES = {
    CHAT: [
        b'"messages":[{"role":"user","content":"<s>","x":%b}]',
        b'"messages":[{"role":"user","content":"x"}],"tool_choice":"required","tools":[{"type":'
        b'"function","function":{"name":"f","parameters":{"properties":{"a":%b}}}}]',
        b'"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
        b'"json_schema":{"schema":{"const":%b}}}',
    ],
    "/v1/responses": [b'"input":[{"role":"user","content":"<s>","x":%b}]'],
    "/v1/messages": [b'"max_tokens":1,"messages":[{"role":"user","content":"<s>","x":%b}]'],
    "/v1/cache/prefixes": [b'"messages":[{"role":"user","content":"<s>","x":%b}]'],
    COMPLETIONS: [b'"structured_outputs":{"json":%b}'],
}


@pytest.mark.parametrize("path", PLACES)
async def test_what_is_nested_too_deep_is_refused_wherever_it_stands(server, path):
    for place in PLACES[path]:
        reply = await server.send("POST", path, data=b"{" + place % TREE + b"}")
        assert reply.status == 400, place
        assert "nested over 128" in reply.error["message"]
    quoted = b'"messages":[{"role":"user","content":"' + TEXT + b'"}],"max_tokens":1'
    assert (await server.send("POST", CHAT, data=b"{" + quoted + b"}")).status == 200
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": TEXT.decode()}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    reply = await server.post({"messages": messages}, CHAT)
    assert "arguments nested over 128" in reply.error["message"]


SAID = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
MANY = {
    "texts": (COMPLETIONS, b'{"prompt":[%b"a"]}' % (b'"a",' * MAX_PARTS)),
    "lists": (COMPLETIONS, b'{"prompt":"A","unknown":[%b[]]}' % (b"[]," * MAX_PARTS)),
    "names": (CHAT, SAID + b'"metadata":{%b"":1}}' % (b'"k":1,' * MAX_PARTS)),
    "token ids": ("/detokenize", b'{"tokens":[%b1]}' % (b"1," * MAX_VALUES)),
    "messages": ("/v1/messages", b'{"messages":[%b{}]}' % (b"{}," * MAX_PARTS)),
}


@pytest.mark.parametrize("kind", MANY)
async def test_more_values_than_can_be_read_in_passing_are_refused_unread(server, kind):
    path, data = MANY[kind]
    reply = await server.send("POST", path, data=io.BytesIO(data))
    assert (reply.status, reply.error["param"]) == (400, None)
    assert "made of over" in reply.error["message"]
    arguments = {"name": "f", "arguments": "[" + "{}," * MAX_PARTS}
    messages = [{"role": "assistant", "tool_calls": [{"function": arguments}]}]
    reply = await server.post({"messages": messages}, CHAT)
    assert "arguments made of over" in reply.error["message"]


@pytest.mark.parametrize("text", ['[{"a",' * 80_000, '\\"[' * 80_000, "[" * 300_000])
def test_what_stands_inside_a_text_has_no_bound(text):
    data = msgspec.json.encode({"prompt": text, "stop": ["\\", '"']})
    assert out_of_bounds(data) is None
    assert out_of_bounds(data + b"[" * 200) is not None


async def test_values_just_within_the_bound_are_read(server):
    data = b'{"prompt":"ABC","max_tokens":3,"temperature":0,"unknown":[%b1]}' % (b"1," * 10**6)
    assert (await server.send("POST", COMPLETIONS, data=io.BytesIO(data))).text == "DEF"
    reply = await server.post({"prompt": [1] * 3000})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "over the model's maximum context length of 2048 tokens" in reply.error["message"]


async def test_ids_of_any_characters_are_echoed_without_breaking_head_or_log(server, caplog):
    caplog.set_level("INFO")
    given = "\u202e\u0000\n\r\U0001f600"
    reply = await server.post(ASK | {"request_id": given, "user": given, "cache_salt": given})
    assert reply.text == "DEF"
    reply = await server.post(ASK, headers={"X-Request-Id": "id-\u202e-\U0001f600"})
    assert reply.headers["x-request-id"].isascii()
    assert all("\n" not in record.getMessage() for record in caplog.records)


SPELLINGS = [
    b"//metrics", b"/v1/../metrics", b"/v1/%2e%2e/metrics", b"/./metrics", b"/%6detrics",
    b"/metrics/", b"/metrics;/health", b"/metrics?/health", b"/health/../metrics", b"/METRICS",
    b"/health%2f..%2fmetrics", b"/page/..%2fapp.py", b"/page/%2e%2e/app.py", b"/metrics%00",
    b"http://x/metrics", b"http://health/metrics", b"//health/../metrics", b"/\\metrics",
    b"/health/live/../../metrics", b"/v1%2fmodels", b"/metrics%20", b"*",
]  # fmt: skip


@pytest.mark.parametrize("path", SPELLINGS)
async def test_no_spelling_of_a_path_gets_past_the_key(start, path):
    server = await start(api_keys=("sk-1",))
    status, _, body = await ask(server, b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert status in (400, 401, 404)
    assert b"vllm:" not in body
    assert b'"error"' in body


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_is_answered_without_chunks_and_the_connection_ends(server, stream):
    reader, writer = await connect(server)
    data = msgspec.json.encode(ASK | {"temperature": 0, "stream": stream})
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data)
    writer.write(head + data)
    async with asyncio.timeout(10):
        answer = await reader.read()  # to the end of the connection
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    assert b"transfer-encoding" not in head.lower()
    events = [line[6:] for line in body.split(b"\n\n") if line] if stream else [body]
    texts = [msgspec.json.decode(e)["choices"][0]["text"] for e in events if e != b"[DONE]"]
    assert "".join(texts) == "DEF"
    assert events[-1] == b"[DONE]" or not stream
    writer.close()


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(server):
    data = msgspec.json.encode(ASK | {"temperature": 0})
    reader, writer = await connect(server)
    writer.write(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data))
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(data)
        assert b'"DEF"' in await reader.readuntil(b"]")
    writer.close()


async def test_chunks_that_never_end_are_given_up(start):
    server = await start(limits=ServerLimits(body_timeout_s=0.3))
    reader, writer = await connect(server)
    writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")

    async def drip() -> None:
        while True:
            writer.write(b"1\r\n \r\n")
            await asyncio.sleep(0.05)

    task = asyncio.create_task(drip())
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408")
    task.cancel()
    assert server.state.num_waiting_bytes == 0
    writer.close()


async def test_what_is_no_http_behind_good_requests_ends_only_its_own_connection(server):
    reader, writer = await connect(server)
    good = b'POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"tokens":[32]}'
    writer.write(good * 20)
    async with asyncio.timeout(10):
        for _ in range(20):
            assert b'{"prompt":"A"}' in await reader.readuntil(b"}")
        writer.write(b"garbage\r\n\r\n")
        assert b"no valid HTTP" in await reader.read()
    assert (await server.post(ASK)).text == "DEF"
    writer.close()
