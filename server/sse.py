"""Server-sent events, written with as little work as a token can bear.

Chunks go straight to the connection in our own chunked framing: at tens of thousands of tokens a
second, what an HTTP library does around each write would cost more than the model.
"""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress

from aiohttp import web

from server.state import ServerLimits

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: no event for clients, but bytes for proxies
HIGH_WATER = 256 * 1024  # bytes unsent before a stream waits for its reader
POLL_S = 0.02


class SlowReader(ConnectionError):
    """The client does not read; its stream is given up."""


class EventStream:
    """One response of server-sent events. Nothing is sent before `start`."""

    def __init__(self, request: web.Request, limits: ServerLimits):
        self._request = request
        self._timeout_s, self._keep_alive_s = limits.write_timeout_s, limits.sse_keep_alive_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._is_chunked = request.version >= (1, 1)
        self._starting = asyncio.Lock()
        self._is_silent = True  # since the last look
        self.is_started = False  # there is no status to tell a refusal with any more
        self.num_bytes = 0  # written so far

    async def start(self) -> None:
        """Send the head, once."""
        async with self._starting:
            if self.is_started:
                return
            self.is_started = True
            if self._is_chunked:
                self.response.enable_chunked_encoding()
            else:
                self.response.force_close()
            self._request[STREAM] = self
            await self.response.prepare(self._request)

    @contextmanager
    def kept_alive(self) -> Generator[None]:
        """Meanwhile a comment is sent where nothing was for --sse-keep-alive-interval.

        Ends quietly where the client of a stream that has begun is gone.
        """
        task = None
        if self._keep_alive_s:
            task = asyncio.create_task(self._keep_alive(self._keep_alive_s / 2))
        try:
            yield
        except ConnectionError as error:
            if not self.is_started:
                raise
            log.info("%s: %s", self._request.path, error)
        finally:
            if task is not None:
                task.cancel()

    async def _keep_alive(self, half_s: float) -> None:
        with suppress(ConnectionError):  # the client has gone: the handler learns it itself
            while True:
                self._is_silent = True
                await asyncio.sleep(half_s)
                if self._is_silent:
                    await asyncio.shield(self.start())
                    self.write(KEEP_ALIVE)

    def write(self, events: bytes) -> bool:
        """Hand whole events to the connection; False once so much is unsent that one should wait.

        A client that has gone is not noticed here: its handler is cancelled.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return True
        if events:  # an empty chunk would end the body
            self._is_silent = False
            self.num_bytes += len(events)
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

    async def finish(self, tail: bytes = DONE) -> None:
        """End the body. Raises as `send` does."""
        await self.send(tail)
        await self.response.write_eof()

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


STREAM = web.RequestKey("stream", EventStream)
