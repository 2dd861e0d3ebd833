"""Connections that have not sent the head of their first request yet."""

import asyncio

from aiohttp.web_protocol import RequestHandler


class HeadDeadlines:
    """Cuts a connection whose first request does not begin in time, however slowly it drips."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timers: dict[RequestHandler, asyncio.TimerHandle] = {}

    def expect(self, protocol: RequestHandler) -> None:
        loop = asyncio.get_running_loop()
        self._timers[protocol] = loop.call_later(self._seconds, self._cut, protocol)

    def arrived(self, protocol: RequestHandler) -> None:
        timer = self._timers.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, protocol: RequestHandler) -> None:
        del self._timers[protocol]
        transport = protocol.transport
        if transport is not None:
            transport.abort()
