"""Takes connections from a listening socket: few in a pass of the event loop, so that others are
served and closed between, and calmly while the process has no file for another.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable

from server.deadlines import Connections, TimedConnection

log = logging.getLogger(__name__)

BACKLOG = 2048
PER_PASS = 32  # well below the files that `connection_limit` spares
PAUSE_S = 0.1  # after a connection that could not be taken
TELL_S = 10.0  # between two lines in the log about that
ENDED = (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED)  # nobody waits any more


class Acceptor:
    """Accepts until `close`. asyncio's own takes the whole backlog at once, and where files run
    out in the middle of it, fills the log and the loop with its retries.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], TimedConnection],
        connections: Connections,
        context: ssl.SSLContext | None,
    ):
        """Raises OSError where another socket listens on the address already."""
        self._listening, self._connect = listening, connect
        self._connections, self._context = connections, context
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = -TELL_S
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Take no more; what has been taken goes on."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(PER_PASS):
            try:
                taken, _ = self._listening.accept()
            except OSError as error:
                if error.errno not in ENDED:
                    self._pause(error)
                return
            taken.setblocking(False)
            self._begin(taken)

    def _begin(self, taken: socket.socket) -> None:
        connection = self._connect()
        seconds = None if self._context is None else self._connections.head_s
        joining = self._loop.create_task(
            self._loop.connect_accepted_socket(
                lambda: connection, taken, ssl=self._context, ssl_handshake_timeout=seconds
            )
        )
        self._connections.accepted(connection, joining)

        def joined(ended: asyncio.Task[object]) -> None:
            self._connections.joined(connection)
            if ended.cancelled() or ended.exception() is not None:  # a handshake that came to none
                taken.close()

        joining.add_done_callback(joined)

    def _pause(self, error: OSError) -> None:
        """Leave the others in the backlog for a moment, and give up one that rests."""
        self._loop.remove_reader(self._listening)
        self._timer = self._loop.call_later(PAUSE_S, self._resume)
        self._connections.make_room()
        now = time.monotonic()
        if now >= self._told_at + TELL_S:
            self._told_at = now
            log.warning("no connection can be taken: %s", os.strerror(error.errno or 0))
