"""Server-sent events, written with as little work as a token can bear.

Chunks go straight to the connection in our own chunked framing: at tens of thousands of tokens a
second, what an HTTP library does around each write would cost more than the model.
"""

import asyncio

from aiohttp import web

DONE = b"data: [DONE]\n\n"
HIGH_WATER = 256 * 1024  # bytes unsent before a stream waits for its reader
WRITE_TIMEOUT_S = 30.0
POLL_S = 0.02


class SlowReader(ConnectionError):
    """The client does not read; its stream is given up."""


class EventStream:
    """One response of server-sent events. Nothing is sent before `start`."""

    def __init__(self, request: web.Request, write_timeout_s: float = WRITE_TIMEOUT_S):
        self._request = request
        self._timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._is_chunked = request.version >= (1, 1)
        self.is_started = False

    async def start(self) -> None:
        if self._is_chunked:
            self.response.enable_chunked_encoding()
        else:
            self.response.force_close()
        await self.response.prepare(self._request)
        self.is_started = True

    def write(self, events: bytes) -> bool:
        """Hand whole events to the connection; False once so much is unsent that one should wait.

        A client that has gone is not noticed here: its handler is cancelled.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return True
        if events:  # an empty chunk would end the body
            framed = b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events
            transport.write(framed)
        return transport.get_write_buffer_size() <= HIGH_WATER

    async def send(self, events: bytes) -> None:
        """`write`, and wait for a slow reader.

        Raises:
            ConnectionError: the client has gone, or did not read for too long.
        """
        if not self.write(events):
            await self.wait_for_reader()

    async def finish(self, tail: bytes = DONE) -> web.StreamResponse:
        await self.send(tail)
        await self.response.write_eof()
        return self.response

    async def wait_for_reader(self) -> None:
        """Wait until most of what was written is sent. Raises as `send` does."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while transport.get_write_buffer_size() > HIGH_WATER // 4:
            if transport.is_closing():
                raise ConnectionResetError("the client has gone")
            if loop.time() > deadline:
                transport.abort()
                raise SlowReader(f"the client has not read for {self._timeout_s:g} s")
            await asyncio.sleep(POLL_S)
