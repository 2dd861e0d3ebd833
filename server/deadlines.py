"""The head of every request must come in time, however slowly a client drips it."""

import asyncio

from aiohttp.web_protocol import RequestHandler


class HeadDeadlines:
    """Knows which connections owe the rest of a head, and cuts those that do not pay in time."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timers: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._working: set[RequestHandler] = set()

    def expect(self, protocol: RequestHandler) -> None:
        """A head begins, or a connection that owes its first one."""
        if protocol not in self._timers and protocol not in self._working:
            loop = asyncio.get_running_loop()
            self._timers[protocol] = loop.call_later(self._seconds, self._cut, protocol)

    def arrived(self, protocol: RequestHandler) -> None:
        """The head is whole, and its request is being answered."""
        self._working.add(protocol)
        self._forget_timer(protocol)

    def answered(self, protocol: RequestHandler) -> None:
        """Whatever comes now is the next head; until then the connection may rest."""
        self._working.discard(protocol)

    def closed(self, protocol: RequestHandler) -> None:
        self._forget_timer(protocol)

    def _forget_timer(self, protocol: RequestHandler) -> None:
        timer = self._timers.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, protocol: RequestHandler) -> None:
        del self._timers[protocol]
        transport = protocol.transport
        if transport is not None:
            transport.abort()


class TimedConnection(asyncio.Protocol):
    """Stands before aiohttp's protocol and tells the deadlines when bytes come."""

    def __init__(self, inner: RequestHandler, deadlines: HeadDeadlines):
        self._inner, self._deadlines = inner, deadlines

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._deadlines.expect(self._inner)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._deadlines.expect(self._inner)
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadlines.closed(self._inner)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
