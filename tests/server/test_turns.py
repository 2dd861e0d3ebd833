"""A burst of requests does not hold up the tokens of open streams."""

import asyncio

import pytest

from server import completions
from server.turns import Turns
from tests.server.conftest import COMPLETIONS


class Passes:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._tick()

    def _tick(self) -> None:
        self.number += 1
        self._next = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._next.cancel()


async def test_bodies_that_arrive_at_once_are_read_one_in_a_pass_of_the_loop(server, monkeypatch):
    read, seen, passes = completions.read_completion, [], Passes()

    def noting(body):
        seen.append(passes.number)
        return read(body)

    monkeypatch.setattr(completions, "read_completion", noting)
    whole = (
        b'POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 31\r\n\r\n{"prompt":"ABC","max_tokens":2}'
    )
    lines = [
        await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        for _ in range(8)
    ]
    for _, writer in lines:
        writer.write(whole % COMPLETIONS.encode())
    for reader, writer in lines:
        assert b"200 OK" in await reader.readline()
        writer.close()
    passes.stop()
    assert len(set(seen)) == len(seen) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_one_request_are_encoded_one_in_a_pass_of_the_loop(
    server, monkeypatch, stream
):
    encode, seen, passes = server.llm.encode, [], Passes()

    def noting(prompt):
        seen.append(passes.number)
        return encode(prompt)

    monkeypatch.setattr(server.llm, "encode", noting)
    body = {"prompt": ["ABC"] * 8, "max_tokens": 2, "stream": stream}
    assert (await server.post(body)).status == 200
    passes.stop()
    assert len(set(seen)) == len(seen) == 8


async def test_a_caller_that_leaves_passes_its_turn_on():
    turns, order = Turns(), []

    async def read(name):
        await turns.next()
        order.append(name)

    tasks = [asyncio.create_task(read(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "c", "d"]
    await asyncio.wait_for(turns.next(), 1)
