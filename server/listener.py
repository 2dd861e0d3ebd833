"""An application on a socket: the HTTP settings that the handlers rely on."""

import os
import resource
import socket
import ssl
from typing import Self

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from jaxpaged.errors import ConfigError
from server.acceptor import Acceptor
from server.deadlines import TimedConnection
from server.errors import HttpError, error_response, log_refusal
from server.state import SERVER

KEEPALIVE_S = 75.0
MOST_FILES, SPARE_FILES = 16_384, 256
CLOSE_S = 1.0  # for connections to end by themselves, once nobody works any more


def connection_limit() -> int:
    """How many connections the process has files for, once it may open as many as the system lets.

    Some files stay free for everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most - min(SPARE_FILES, most // 2)


def address_of(listening: socket.socket) -> str:
    """Where a socket listens, as one writes it."""
    if listening.family == socket.AF_UNIX:
        return str(listening.getsockname())
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


class HttpProtocol(RequestHandler):
    """aiohttp's, but what is no HTTP gets an answer in the shape of all other errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a head that cannot be read; the connection ends with it."""
        error: BaseException = exc or HttpError(status, "the request could not be answered")
        if status != 500:
            reason = (message or "").strip().partition("\n")[0] or "malformed"
            error = HttpError(status, f"the request is no valid HTTP: {reason}")
        log_refusal(request, error)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: there is no place for an error")
        response = error_response(error, "")
        response.force_close()
        return response


class Listener:
    """Accepts connections until `close`, which ends them."""

    def __init__(self, app: web.Application):
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves cancels its handler
            auto_decompress=False,  # compressed bodies are refused, not unpacked
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=CLOSE_S,
        )
        self._state = app[SERVER]
        self._acceptor: Acceptor | None = None

    @classmethod
    async def start(
        cls,
        app: web.Application,
        listening: socket.socket,
        ssl_context: ssl.SSLContext | None = None,
    ) -> Self:
        """Accept on a socket that is bound already.

        Raises:
            ConfigError: another that was bound to the same address accepts on it.
        """
        listener = cls(app)
        await listener._runner.setup()
        connections = listener._state.connections
        try:
            listener._acceptor = Acceptor(listening, listener._connect, connections, ssl_context)
        except OSError as error:
            raise ConfigError(
                f"{address_of(listening)} cannot be listened on: {os.strerror(error.errno or 0)}"
            ) from None
        return listener

    async def close(self) -> None:
        """Take no new connections, and end every one; handlers that still run are cancelled."""
        if self._acceptor is not None:
            self._acceptor.close()
        await self._runner.cleanup()

    def _connect(self) -> TimedConnection:
        """A new connection; it is cut if the head of a request takes too long."""
        server = self._runner.server
        assert server is not None
        protocol: RequestHandler = server()
        protocol.__class__ = HttpProtocol  # aiohttp makes it without asking which
        return TimedConnection(protocol, self._state.connections)
