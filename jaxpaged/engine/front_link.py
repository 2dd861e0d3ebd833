"""An engine's process as the front sees it: a socket, signs of life, calls that are answered.

The front at the other end parses, tokenises and writes HTTP; nothing of that takes time from a step
here.
"""

import asyncio
import ctypes
import faulthandler
import logging
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from jaxpaged.engine.wire import (
    Beat,
    Frames,
    Ready,
    Refusal,
    Reply,
    Start,
    ToEngine,
    ToFront,
    frame,
    to_engine,
)
from jaxpaged.errors import EngineStopped, InvariantError, JaxPagedError

log = logging.getLogger(__name__)

READ_BYTES = 2**18
BEAT_S = 0.25  # between two signs of life
FLUSH_S = 1.0
PR_SET_PDEATHSIG = 1

EXIT_DONE, EXIT_STOPPED, EXIT_SETTINGS = 0, 1, 2


class Closable(Protocol):
    def close(self) -> None: ...


class Sender:
    """Messages to the front, from any thread. What the socket does not take at once waits."""

    def __init__(self, sock: socket.socket, on_backlog: Callable[[], None]):
        self._sock, self._on_backlog = sock, on_backlog
        self._lock, self._backlog = threading.Lock(), bytearray()

    def send(self, message: ToFront) -> None:
        data = frame(message)
        with self._lock:
            if not self._backlog:
                data = data[self._try(data) :]
            self._backlog += data
        if data:
            self._on_backlog()

    def flush(self) -> bool:
        """Send what waits; True once nothing does."""
        with self._lock:
            del self._backlog[: self._try(self._backlog)]
            return not self._backlog

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data) if data else 0
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # nobody is there to read it; the reading side ends the process


class FrontLink(ABC):
    """Does what the front asks of one engine, until the front or the engine is gone."""

    name = "engine"

    def __init__(self, sock: socket.socket):
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self.sender = Sender(sock, self._flush_later)

    @abstractmethod
    def ready(self) -> Ready:
        """What the front is told first."""

    @abstractmethod
    def beat(self) -> Beat | None:
        """A sign of life, None once there is none."""

    @abstractmethod
    def take(self, message: ToEngine) -> None:
        """Begin what a message asks for."""

    async def run(self) -> int:
        """Serve; the exit code."""
        self._sock.setblocking(False)
        self.sender.send(self.ready())
        reading, beating = asyncio.create_task(self._read()), asyncio.create_task(self._beat())
        done, _ = await asyncio.wait({reading, beating}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        beating.cancel()
        if reading in done:
            return EXIT_DONE
        self.sender.send(Refusal.of(EngineStopped(f"the {self.name} has stopped")))
        self._sock.settimeout(FLUSH_S)
        self.sender.flush()
        return EXIT_STOPPED

    async def answer(self, call_id: int, call: Callable[[], Awaitable[Any]]) -> None:
        """Send what comes of a call; an error that nobody foresaw must not leave it waiting."""
        try:
            reply = Reply(call_id, await call())
        except Exception as error:
            if not isinstance(error, JaxPagedError):
                log.error("a call failed", exc_info=error)
                error = InvariantError("internal error; the server's log has the cause")
            reply = Refusal.of(error, call_id=call_id)
        self.sender.send(reply)

    async def _read(self) -> None:
        frames = Frames()
        while data := await self._loop.sock_recv(self._sock, READ_BYTES):
            for message in frames.feed(data):
                self.take(to_engine.decode(message))

    async def _beat(self) -> None:
        while beat := self.beat():
            self.sender.send(beat)
            await asyncio.sleep(BEAT_S)

    def _flush_later(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._flush)

    def _flush(self) -> None:
        if self.sender.flush():
            self._loop.remove_writer(self._sock)


def serve_front[T: Closable](
    name: str, load: Callable[[Start], T], link: Callable[[T, socket.socket], FrontLink]
) -> int:
    """Load what the first message on the socket of argument 1 says, and serve it."""
    _follow_the_front()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        start = _read_start(sock)
        logging.basicConfig(
            level=start.log_level.upper(), format=f"%(asctime)s %(levelname)s {name}: %(message)s"
        )
        logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every device it lacks
        try:
            engine = load(start)
        except JaxPagedError as error:
            sock.sendall(frame(Refusal.of(error)))
            return EXIT_SETTINGS

        async def serve() -> int:
            return await link(engine, sock).run()

        code = asyncio.run(serve())
    engine.close()
    return code


def _follow_the_front() -> None:
    """End with the front and not before it: signals are its to act on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_start(sock: socket.socket) -> Start:
    frames = Frames()
    while data := sock.recv(READ_BYTES):
        for message in frames.feed(data):
            start = to_engine.decode(message)
            assert isinstance(start, Start)
            return start
    sys.exit(EXIT_DONE)  # the front has gone
