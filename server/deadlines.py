"""What a connection owes in time: the head of a request, and reading its answer.

And how many there may be: where no more fit, the one that has rested longest makes room.
"""

import asyncio

from aiohttp.web_protocol import RequestHandler


class Connections:
    """All open connections: which rest, which owe the rest of a head, which are answered.

    Args:
        head_s: seconds for a head, from its first byte or the connection's beginning.
        read_s: seconds in which a client must read something of an answer that waits for it.
        most: how many may be open at once.
    """

    def __init__(self, head_s: float, read_s: float, most: int):
        self.head_s, self.read_s, self._most = head_s, read_s, most
        self._num_open = 0
        self._joining: dict[TimedConnection, asyncio.Task[object]] = {}  # longest first
        self._timers: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._working: set[RequestHandler] = set()
        self._followed: set[RequestHandler] = set()  # answered one since bytes came last
        self._resting: dict[RequestHandler, None] = {}  # longest first

    def accepted(self, connection: "TimedConnection", joining: asyncio.Task[object]) -> None:
        """A new one; `joining` ends once it is open, or not, as where TLS is not agreed on."""
        self._joining[connection] = joining
        if self._num_open + len(self._joining) > self._most and not self.make_room():
            self._joining.pop(next(iter(self._joining))).cancel()

    def joined(self, connection: "TimedConnection") -> None:
        """It is open, or will never be."""
        self._joining.pop(connection, None)

    def make_room(self) -> bool:
        """Cut the one that has rested longest; False where none rests."""
        oldest = next(iter(self._resting), None)
        if oldest is None:
            return False
        del self._resting[oldest]
        _abort(oldest)
        return True

    def opened(self, protocol: RequestHandler) -> None:
        self._num_open += 1
        self._resting[protocol] = None

    def expect(self, protocol: RequestHandler) -> None:
        """A head begins, or a connection that owes its first one."""
        if protocol not in self._timers and protocol not in self._working:
            loop = asyncio.get_running_loop()
            self._timers[protocol] = loop.call_later(self.head_s, self._cut, protocol)

    def received(self, protocol: RequestHandler) -> None:
        """Bytes came."""
        self._followed.discard(protocol)
        self.expect(protocol)

    async def arrived(self, protocol: RequestHandler) -> None:
        """The head is whole, and its request is being answered.

        One that lay ready behind another waits a pass of the event loop: thousands that are sent
        at once would be answered in one pass otherwise, in which nobody else is.
        """
        if protocol in self._followed:
            await asyncio.sleep(0)
        self._working.add(protocol)
        self._resting.pop(protocol, None)
        self._forget_timer(protocol)

    def answered(self, protocol: RequestHandler) -> None:
        """Whatever comes now is the next head; until then the connection may rest."""
        self._working.discard(protocol)
        if protocol.transport is not None:
            self._followed.add(protocol)
            self._resting[protocol] = None

    def closed(self, protocol: RequestHandler) -> None:
        self._num_open -= 1
        self._followed.discard(protocol)
        self._resting.pop(protocol, None)
        self._forget_timer(protocol)

    def is_working(self, protocol: RequestHandler) -> bool:
        return protocol in self._working

    def _forget_timer(self, protocol: RequestHandler) -> None:
        timer = self._timers.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, protocol: RequestHandler) -> None:
        del self._timers[protocol]
        _abort(protocol)


def _abort(protocol: RequestHandler) -> None:
    if protocol.transport is not None:
        protocol.transport.abort()


class TimedConnection(asyncio.Protocol):
    """Stands before aiohttp's protocol and tells the deadlines when bytes come and go."""

    def __init__(self, inner: RequestHandler, connections: Connections):
        self._inner, self._connections = inner, connections
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)
        self._connections.joined(self)
        self._connections.opened(self._inner)
        self._connections.expect(self._inner)

    def data_received(self, data: bytes) -> None:
        self._connections.received(self._inner)
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._connections.closed(self._inner)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._watch()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop_watching()
        self._inner.resume_writing()

    def _watch(self) -> None:
        transport = self._inner.transport
        if transport is not None:
            size, loop = transport.get_write_buffer_size(), asyncio.get_running_loop()
            self._unread = loop.call_later(self._connections.read_s, self._look, size)

    def _look(self, size: int) -> None:
        """Cut a client that has read nothing of a whole answer; streams see to theirs."""
        transport = self._inner.transport
        if transport is None:
            return
        if transport.get_write_buffer_size() >= size and not self._connections.is_working(
            self._inner
        ):
            transport.abort()
        else:
            self._watch()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
