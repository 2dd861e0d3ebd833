"""Events on their way from the engine's thread to a request's caller."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from jaxpaged.core.request import TokenEvent


class EventSink(Protocol):
    """Where a request's events go, one call each, in the callers' event loop."""

    def put(self, event: TokenEvent) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Sinks(dict[str, EventSink]):
    """The sinks of all open requests, by request id."""

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            sink = self.get(event.request_id)
            if sink is not None:
                sink.put(event)

    def fail(self, request_id: str, error: Exception) -> None:
        """Have a request's caller see `error`; one that is not here is no error."""
        sink = self.get(request_id)
        if sink is not None:
            sink.fail(error)

    def fail_all(self, error: Exception) -> None:
        for sink in list(self.values()):
            sink.fail(error)


class Inbox:
    """Events of one request on their way to its caller; both ends are in the event loop.

    With `num_ends` the caller is woken only once so many answers have ended.
    """

    def __init__(self, num_ends: int):
        self._num_ends = num_ends
        self._events: list[TokenEvent] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        if self._num_ends:
            self._num_ends -= event.finish_reason is not None
        if not self._num_ends:
            self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> list[TokenEvent]:
        """All events that have come, at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        if self._error is not None:
            self._arrived.set()  # for the next call, where events came before the error
            if not events:
                raise self._error
        return events
