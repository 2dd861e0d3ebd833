"""The front's end of the socket to an engine's process."""

import asyncio
import itertools
import time
from typing import Any

from jaxpaged.engine.inbox import Sinks
from jaxpaged.engine.wire import (
    Beat,
    Events,
    Frames,
    Ready,
    Refusal,
    Reply,
    ToEngine,
    frame,
    to_front,
)
from jaxpaged.errors import EngineStopped, RequestError
from jaxpaged.metrics import EngineLoad


class EngineConnection(asyncio.Protocol):
    """The socket to the engine's process: calls that wait, sinks, and the last state heard."""

    def __init__(self) -> None:
        self.sinks = Sinks()
        self.error: EngineStopped | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.lost = asyncio.Event()
        self.load: EngineLoad | None = None
        self.has_work = False
        self.heard_at = self.progress_at = time.monotonic()
        self._frames = Frames()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        for part in self._frames.feed(data):
            message = to_front.decode(part)
            match message:
                case Events():
                    self.load, self.progress_at = message.load, self.heard_at
                    self.sinks.deliver(message.events)
                case Beat():
                    self.load, self.has_work = message.load, message.has_work
                    self.progress_at = self.heard_at - message.seconds_without_progress
                case Reply():
                    self._settle(message.call_id, message.value)
                case Refusal():
                    self._refuse(message)
                case Ready():
                    self.load = message.load
                    self.ready.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(EngineStopped("the engine's process has ended"))
        self.lost.set()

    def send(self, message: ToEngine) -> None:
        """Give the engine a message.

        Raises:
            RequestError: an integer in it is too large to send.
        """
        if self._transport is None or self.error is not None:
            return
        try:
            data = frame(message)
        except OverflowError:
            raise RequestError(
                "the request has an integer of over 64 bits, allowed are -2**63 to 2**64 - 1: "
                "write it as a float"
            ) from None
        self._transport.write(data)

    def next_call(self) -> tuple[int, asyncio.Future[Any]]:
        """An id for a message that will be answered, and its answer.

        Raises:
            EngineStopped: nobody is there to answer.
        """
        if self.error is not None:
            raise self.error
        call_id, future = next(self._call_ids), asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return call_id, future

    def _settle(self, call_id: int, value: Any) -> None:
        future = self._calls.get(call_id)
        if future is not None and not future.done():
            future.set_result(value)

    def _refuse(self, refusal: Refusal) -> None:
        error = refusal.error()
        if refusal.call_id is not None:
            future = self._calls.get(refusal.call_id)
            if future is not None and not future.done():
                future.set_exception(error)
        elif refusal.request_id is not None:
            self.sinks.fail(refusal.request_id, error)
        elif not self.ready.done():
            self.ready.set_exception(error)
        else:
            self.fail(EngineStopped(refusal.text))

    def fail(self, error: EngineStopped) -> None:
        """Nothing will be answered any more."""
        if self.error is not None:
            return
        self.error = error
        if not self.ready.done():
            self.ready.set_exception(error)
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(error)
        self.sinks.fail_all(error)
