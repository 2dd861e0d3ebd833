"""Events on their way from the engine's thread to a request's caller."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.request import TokenEvent


class EventSink(Protocol):
    """Where a request's events go, one call each, in the callers' event loop."""

    def put(self, event: TokenEvent) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Sinks(dict[str, EventSink]):
    """The sinks of all open requests, by request id."""

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Pass on what a step gave, the youngest sequences first.

        Writing hundreds of chunks takes a step's time, and a first token is waited for most.
        """
        for event in reversed(events):
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


class Spaced:
    """Passes events on in pieces of `interval` tokens an answer; the first token at once."""

    def __init__(self, sink: EventSink, interval: int):
        self._sink, self._interval = sink, interval
        self._kept: dict[int, TokenEvent | None] = {}  # by answer, once it has begun

    def put(self, event: TokenEvent) -> None:
        is_first, kept = event.choice not in self._kept, self._kept.get(event.choice)
        whole = event if kept is None else _joined(kept, event)
        self._kept[event.choice] = None
        if is_first or event.finish_reason is not None or len(whole.token_ids) >= self._interval:
            self._sink.put(whole)
        else:
            self._kept[event.choice] = whole

    def fail(self, error: Exception) -> None:
        for kept in self._kept.values():
            if kept is not None:
                self._sink.put(kept)
        self._kept.clear()
        self._sink.fail(error)


def spaced[S: EventSink](sink: S, params: SamplingParams) -> S | Spaced:
    """`sink` as a stream's `stream_interval` wants it."""
    interval = params.stream_interval or 1
    return (
        sink
        if interval == 1 or params.output_kind is not OutputKind.DELTA
        else Spaced(sink, interval)
    )


def _joined(before: TokenEvent, event: TokenEvent) -> TokenEvent:
    logprobs = None if event.logprobs is None else (*(before.logprobs or ()), *event.logprobs)
    return event._replace(
        token_ids=before.token_ids + event.token_ids,
        text=before.text + event.text,
        logprobs=logprobs if event.logprobs is not None else before.logprobs,
    )


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
