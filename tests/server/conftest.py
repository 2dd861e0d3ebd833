"""A server over the successor model, in the test's own event loop."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware

from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.pooling.served import ServedPooling
from server.app import create_app
from server.auth import ApiKey
from server.batching.store import BatchStore
from server.listener import Listener
from server.state import SERVER, ServerLimits, ServerState
from tests.support.fake_engine import FakeEngine, fake_llm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Reply:
    """One HTTP answer; `events` are the data of a stream without its [DONE]."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [line[6:] for line in self.raw.split(b"\n\n") if line]
        assert lines[-1] == b"[DONE]"
        return [msgspec.json.decode(line) for line in lines[:-1]]

    @property
    def texts(self) -> list[str]:
        """Texts of choice 0, chunk by chunk."""
        choices = [c for event in self.events for c in event["choices"] if c["index"] == 0]
        return [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]


@dataclass
class Running:
    """A server, its parts, and a client."""

    llm: AsyncLLM
    engine: FakeEngine
    app: web.Application
    url: str
    session: aiohttp.ClientSession

    @property
    def state(self) -> ServerState:
        return self.app[SERVER]

    async def send(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.url + path, **options) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, await response.read())

    async def post(self, body: Any, path: str = COMPLETIONS, **options: Any) -> Reply:
        """`body` with temperature 0 where it says nothing else."""
        if path in (COMPLETIONS, CHAT) and isinstance(body, dict):
            body = {"temperature": 0} | body
        return await self.send("POST", path, json=body, **options)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.send("GET", path, **options)


type Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start servers; keywords are those of `fake_llm` and of `create_app`."""
    closing: list[Callable[[], Awaitable[None]]] = []

    async def start_one(
        api_keys: tuple[str | ApiKey, ...] = (),
        limits: ServerLimits | None = None,
        store: BatchStore | None = None,
        pooling: ServedPooling | None = None,
        middlewares: tuple[Middleware, ...] = (),
        **options: Any,
    ) -> Running:
        llm, engine = fake_llm(tmp_path / f"model{len(closing)}", **options)
        app = create_app(llm, api_keys, limits, store, pooling, middlewares)
        listening = socket.create_server(("127.0.0.1", 0))
        listener = await Listener.start(app, listening)
        session = aiohttp.ClientSession()
        running = Running(
            llm, engine, app, f"http://127.0.0.1:{listening.getsockname()[1]}", session
        )

        async def close() -> None:
            engine.before_step = lambda step: None
            await session.close()
            await listener.close()
            if llm.is_running:
                llm.close()

        closing.append(close)
        return running

    yield start_one
    for close in reversed(closing):
        await close()


@pytest.fixture
async def server(start: Start) -> Running:
    return await start()
