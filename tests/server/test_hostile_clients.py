"""What only an attacker or a broken proxy sends: told as all errors are, and nobody is harmed."""

import asyncio

import msgspec
import pytest

from tests.server.conftest import Running
from tests.server.test_slow_clients import connect

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
