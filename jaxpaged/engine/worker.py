"""An engine in a process of its own: `python -m jaxpaged.engine.worker FD`.

The engine's thread sends a step's events itself, as one message.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxpaged.core.request import TokenEvent
from jaxpaged.engine.front_link import FrontLink, Sender, serve_front
from jaxpaged.engine.wire import (
    Beat,
    Call,
    Events,
    Ready,
    Refusal,
    Release,
    Start,
    Submit,
    ToEngine,
)
from jaxpaged.errors import EngineStopped

if TYPE_CHECKING:
    from jaxpaged.engine.async_engine import AsyncLLM

# methods of AsyncLLM that the front may call by name
CALLS = frozenset({"metrics_text", "explanation", "control", "abort"})


@dataclass(frozen=True)
class _Failures:
    """A request's sink: its events are sent by the step, so only failures come here."""

    sender: Sender
    request_id: str

    def put(self, event: TokenEvent) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.sender.send(Refusal.of(error, request_id=self.request_id))


class Worker(FrontLink):
    """The link of an engine that generates."""

    def __init__(self, llm: "AsyncLLM", sock: socket.socket):
        super().__init__(sock)
        self._llm = llm
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        llm.on_events = lambda events: self.sender.send(Events(events, llm.load))

    def ready(self) -> Ready:
        llm = self._llm
        return Ready(
            llm.parts.config, llm.vocab, llm.max_model_len, llm.default_sampling(), llm.load
        )

    def beat(self) -> Beat | None:
        llm = self._llm
        if not llm.is_running:
            return None
        return Beat(llm.seconds_without_progress, llm.parts.engine.has_work, llm.load)

    def take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                task = asyncio.create_task(
                    self.answer(message.call_id, partial(self._submit, message))
                )
                self._tasks[message.request_id] = task
            case Release(request_id, is_finished):
                self._release(request_id, is_finished)
            case Call():
                task = asyncio.create_task(
                    self.answer(message.call_id, partial(self._call, message))
                )
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case Start():
                pass  # was read before there was an engine

    async def _submit(self, message: Submit) -> list[int]:
        sink = _Failures(self.sender, message.request_id)
        request, _ = await self._llm.submit(
            message.token_ids,
            message.params,
            message.request_id,
            sink,
            priority=message.priority,
            cache_salt=message.cache_salt,
            key_name=message.key_name,
            pin=message.pin,
        )
        return [request.max_tokens, request.seed]

    def _release(self, request_id: str, is_finished: bool) -> None:
        """Pass it on, after the submission that it ends."""
        task = self._tasks.pop(request_id, None)
        if task is None or task.done():
            self._llm.release(request_id, is_finished=is_finished)
        else:
            task.add_done_callback(lambda _: self._llm.release(request_id, is_finished=is_finished))

    async def _call(self, message: Call) -> Any:
        if message.method not in CALLS:
            raise EngineStopped(f"there is no call {message.method!r}")
        if message.method == "abort" and (task := self._tasks.get(message.arguments[0])):
            await asyncio.wait([task])  # the engine cannot end what it has not got
        return await getattr(self._llm, message.method)(*message.arguments)


def main(make: "Callable[[Start], AsyncLLM] | None" = None) -> int:
    """Load what the first message says, and serve it. `make` stands in for the loading in tests."""
    return serve_front("engine", make or _load, Worker)


def _load(start: Start) -> "AsyncLLM":
    from jaxpaged.engine.async_engine import AsyncLLM  # brings JAX, which takes seconds

    return AsyncLLM.from_config(start.config, show_progress=start.show_progress)


if __name__ == "__main__":
    sys.exit(main())
