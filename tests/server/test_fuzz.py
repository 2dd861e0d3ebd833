"""Seeded nonsense on every route: never a 5xx, never an odd error, never a changed answer."""

import asyncio

import pytest

from benchmarks.fuzz import fault, fuzz, routes_of
from server import errors


@pytest.mark.parametrize(
    "count", [400, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_nonsense_is_refused_or_answered(start, count):
    server = await start(max_len=64)
    assert await fuzz(server.url, count, seed=count) == []
    async with asyncio.timeout(5):
        while server.engine.has_work:
            await asyncio.sleep(0.01)
    assert server.llm.num_open_requests == 0


async def test_every_route_is_known_to_the_fuzzer(server):
    paths = {path for _, path, _ in await routes_of(_At(server))}
    assert {"/v1/completions", "/v1/models/{model}", "/v1/cache/prefixes", "/tokenize"} <= paths
    assert not {path for path in paths if "sleep" in path} - {"/is_sleeping"}


async def test_what_is_wrong_is_found(server, monkeypatch):
    assert fault("/", 500, "application/json", b"{}") == "status 500"
    assert fault("/", 400, "application/json", b"<html>") == "an error that is no JSON"
    assert fault("/", 400, "application/json", b'{"error": {}}') == "an error of another shape"
    assert fault("/", 200, "text/event-stream", b"data: {}\n\n") == "a stream broke off"
    assert fault("/", 200, "text/event-stream", b"data: [DONE]\n\n") is None
    monkeypatch.setitem(errors._STATUS, errors.RequestError, 500)
    assert len(await fuzz(server.url, 20, seed=0)) > 3


class _At:
    """A session at the server's address."""

    def __init__(self, server):
        self._server = server

    def get(self, path: str):
        return self._server.session.get(self._server.url + path)
