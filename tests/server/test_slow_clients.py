"""Clients that send slowly, read nothing, or open all they can: they are cut, others are served."""

import asyncio
import json
import socket
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from server.deadlines import Connections, TimedConnection
from server.sse import DONE, EventStream
from server.state import ServerLimits
from tests.server.conftest import COMPLETIONS, Running
from tests.server.test_protocol import until

ASK = {"prompt": "ABC", "max_tokens": 3}


async def connect(server: Running, *, reads: bool = True):
    """A connection; one that never `reads` has next to no buffer of its own."""
    sock = socket.socket()
    if not reads:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    await asyncio.get_running_loop().sock_connect(sock, address)
    return await asyncio.open_connection(sock=sock, limit=4096 if not reads else 2**20)


def post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        len(data),
        data,
    )


def num_open(server: Running) -> int:
    return server.state.connections._num_open


async def test_a_whole_answer_that_nobody_reads_is_given_up(start):
    server = await start(max_len=2_000_000, limits=ServerLimits(write_timeout_s=0.2))
    _, writer = await connect(server, reads=False)
    body = {"prompt": "A" * 700_000, "return_token_strs": True}  # answered with 6 MB
    writer.write(post("/tokenize", body))
    await until(lambda: num_open(server) == 1, 20.0)
    await until(lambda: num_open(server) == 0, 60.0)
    assert (await server.post(ASK)).text == "DEF"
    writer.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "ABC"}),
        (COMPLETIONS, {"prompt": "ABC", "logprobs": 1}),
        ("/v1/messages", {"model": "S", "messages": [{"role": "user", "content": "ABC"}]}),
        ("/v1/responses", {"model": "S", "input": "ABC"}),
        ("/v1/responses", {"model": "S", "input": "ABC", "background": True}),
    ],
)
async def test_who_leaves_as_a_stream_ends_is_no_failure(server, monkeypatch, caplog, path, body):
    """The connection is closing, and the handler is not cancelled yet."""
    caplog.set_level("INFO")
    finish = EventStream.finish

    async def leave(stream, tail=DONE):
        stream._request.transport.close()
        return await finish(stream, tail)

    monkeypatch.setattr(EventStream, "finish", leave)
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    with pytest.raises(aiohttp.ClientError):
        await server.post(body | {"temperature": 0, "stream": True, limit: 3}, path)
    await until(lambda: "closing transport" in caplog.text)
    assert all(record.levelname == "INFO" for record in caplog.records)
    monkeypatch.undo()
    assert (await server.post(ASK)).text == "DEF"


@pytest.mark.parametrize(
    ("sizes", "is_cut"), [([9, 9], True), ([9, 8, 8, 8], True), (range(99), False)]
)
async def test_only_who_reads_nothing_for_long_is_cut(sizes, is_cut):
    """`sizes` is what waits for the client at each look."""
    looks, cut = iter(sorted(sizes, reverse=True)), asyncio.Event()
    transport = SimpleNamespace(get_write_buffer_size=lambda: next(looks), abort=cut.set)
    inner: Any = type("Inner", (), {"pause_writing": int, "resume_writing": int})()
    inner.transport = transport
    connection = TimedConnection(inner, Connections(9, 0.002, 9))
    connection.pause_writing()
    if is_cut:
        await asyncio.wait_for(cut.wait(), 10)
    await asyncio.sleep(0.02)
    connection.resume_writing()
    assert cut.is_set() == is_cut


async def test_connections_that_rest_make_room_for_others(start):
    server = await start(limits=ServerLimits(max_connections=20))
    server.engine.before_step = lambda step: None if step > 3 else time.sleep(0.01)
    working, writer = await connect(server)
    body = {"prompt": "ABC", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    writer.write(post(COMPLETIONS, body))
    await working.readuntil(b"data:")
    idle = [await connect(server) for _ in range(60)]
    for _, each in idle[::2]:
        each.write(b"GET /heal")
    for _ in range(3):
        assert (await server.post(ASK, headers={"Connection": "close"})).text == "DEF"
    assert num_open(server) <= 21
    assert (await working.readuntil(b"[DONE]\n\n")).count(b"data:") > 1000
    ended = [await _is_ended(reader) for reader, _ in idle]
    assert 40 <= sum(ended) <= 45
    assert ended == sorted(ended, reverse=True)  # the oldest went first
    for _, each in [*idle, (working, writer)]:
        each.close()


async def _is_ended(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.02):
            return not await reader.read(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def test_a_working_connection_never_makes_room(start):
    server = await start(limits=ServerLimits(max_connections=3))
    server.engine.before_step = lambda step: time.sleep(0.002)
    streams = [await connect(server) for _ in range(3)]
    body = {"prompt": "ABC", "max_tokens": 200, "ignore_eos": True, "stream": True}
    for _, writer in streams:
        writer.write(post(COMPLETIONS, body))
    await until(lambda: server.state.num_working == 3)
    reader, refused = await connect(server)
    assert await _is_ended(reader)
    for reader, _ in streams:
        assert (await reader.readuntil(b"[DONE]\n\n")).count(b"data:") == 201
    for _, writer in [*streams, (None, refused)]:
        writer.close()


async def test_pipelined_requests_are_all_answered_in_order(server):
    reader, writer = await connect(server)
    count = 500
    for i in range(count):
        writer.write(post("/detokenize", {"tokens": [32 + i % 20]}))
    answers = await reader.readuntil(b"}")
    while answers.count(b'"prompt"') < count:
        answers += await reader.readuntil(b"}")
    texts = [part[3:4] for part in answers.split(b'"prompt"')[1:]]
    assert texts == [part[2:3] for part in answers.split(b'{"prompt"')[1:]] or len(texts) == count
    assert (await server.post(ASK)).text == "DEF"
    writer.close()


async def test_between_pipelined_requests_others_have_their_turn(server):
    reader, writer = await connect(server)
    count, num_passes = 300, 0
    writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" * count)

    async def keep_counting() -> None:
        nonlocal num_passes
        while True:
            num_passes += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(keep_counting())
    for _ in range(count):
        await reader.readuntil(b"}}")
    counting.cancel()
    assert num_passes >= count
    writer.close()


@pytest.mark.parametrize("size", [1, 50_000])
async def test_a_bomb_of_chunks_is_refused_before_it_is_all_read(start, size):
    server = await start(limits=ServerLimits(max_request_bytes=30_000))
    reader, writer = await connect(server)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
    sent, answer = 0, asyncio.create_task(reader.readuntil(b"\r\n"))
    while not answer.done() and sent < 100_000:
        writer.write(chunk * max(1, 1000 // size))
        await asyncio.sleep(0)
        sent += max(1, 1000 // size)
    assert b"413" in await answer
    assert sent < 100_000
    assert server.state.num_waiting_bytes == 0
    assert (await server.post(ASK)).text == "DEF"
    writer.close()


async def test_bodies_that_arrive_have_a_bound_together_and_small_ones_always_room(start):
    limits = ServerLimits(max_waiting_bytes=300_000)
    server = await start(limits=limits)
    holding = []
    for _ in range(2):
        _, writer = await connect(server)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head + b" " * 140_000)
        holding.append(writer)
    await until(lambda: server.state.num_waiting_bytes == 280_000)
    reply = await server.post({"prompt": "A" * 100_000})
    assert (reply.status, reply.error["type"]) == (503, "overloaded_error")
    assert (await server.post(ASK)).text == "DEF"
    for writer in holding:
        writer.close()
    await until(lambda: server.state.num_waiting_bytes == 0)
    assert (await server.post({"prompt": "A" * 100_000})).status == 400
