"""An engine in a process of its own: `python -m jaxpaged.engine.worker FD`.

The front at the other end of the socket parses, tokenises and writes HTTP; nothing of that takes
time from a step here. The engine's thread sends a step's events itself, as one message.
"""

import asyncio
import ctypes
import faulthandler
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpaged.core.request import TokenEvent
from jaxpaged.engine.wire import (
    Beat,
    Call,
    Events,
    Frames,
    Ready,
    Refusal,
    Release,
    Reply,
    Start,
    Submit,
    ToEngine,
    ToFront,
    frame,
    to_engine,
)
from jaxpaged.errors import EngineStopped, InvariantError, JaxPagedError

if TYPE_CHECKING:
    from jaxpaged.engine.async_engine import AsyncLLM

log = logging.getLogger(__name__)

READ_BYTES = 2**18
BEAT_S = 0.25  # between two signs of life
FLUSH_S = 1.0
# methods of AsyncLLM that the front may call by name
CALLS = frozenset({"metrics_text", "explanation", "control", "abort"})
PR_SET_PDEATHSIG = 1

EXIT_DONE, EXIT_STOPPED, EXIT_SETTINGS = 0, 1, 2


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


@dataclass(frozen=True)
class _Failures:
    """A request's sink: its events are sent by the step, so only failures come here."""

    sender: Sender
    request_id: str

    def put(self, event: TokenEvent) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.sender.send(Refusal.of(error, request_id=self.request_id))


class Worker:
    """Does what the front asks of one engine, until the front or the engine is gone."""

    def __init__(self, llm: "AsyncLLM", sock: socket.socket):
        self._llm, self._sock = llm, sock
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(sock, self._flush_later)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        llm.on_events = lambda events: self._sender.send(Events(events, llm.load))

    async def run(self) -> int:
        """Serve; the exit code."""
        self._sock.setblocking(False)
        self._sender.send(
            Ready(
                self._llm.parts.config,
                self._llm.vocab,
                self._llm.max_model_len,
                self._llm.default_sampling(),
                self._llm.load,
            )
        )
        reading, beating = asyncio.create_task(self._read()), asyncio.create_task(self._beat())
        done, _ = await asyncio.wait({reading, beating}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        beating.cancel()
        if reading in done:
            return EXIT_DONE
        self._sender.send(Refusal.of(EngineStopped("the engine has stopped")))
        self._sock.settimeout(FLUSH_S)
        self._sender.flush()
        return EXIT_STOPPED

    async def _read(self) -> None:
        frames = Frames()
        while data := await self._loop.sock_recv(self._sock, READ_BYTES):
            for message in frames.feed(data):
                self._take(to_engine.decode(message))

    async def _beat(self) -> None:
        llm = self._llm
        while llm.is_running:
            seconds, has_work = llm.seconds_without_progress, llm.parts.engine.has_work
            self._sender.send(Beat(seconds, has_work, llm.load))
            await asyncio.sleep(BEAT_S)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                task = self._loop.create_task(self._submit(message))
                self._tasks[message.request_id] = task
            case Release(request_id, is_finished):
                self._release(request_id, is_finished)
            case Call():
                task = self._loop.create_task(self._call(message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case Start():
                pass  # was read before there was an engine

    async def _submit(self, message: Submit) -> None:
        sink = _Failures(self._sender, message.request_id)
        try:
            request, _ = await self._llm.submit(
                message.token_ids,
                message.params,
                message.request_id,
                sink,
                priority=message.priority,
                cache_salt=message.cache_salt,
                key_name=message.key_name,
                pin=message.pin,
            )
        except Exception as error:
            self._refuse(message.call_id, error)
        else:
            self._sender.send(Reply(message.call_id, [request.max_tokens, request.seed]))

    def _release(self, request_id: str, is_finished: bool) -> None:
        """Pass it on, after the submission that it ends."""
        task = self._tasks.pop(request_id, None)
        if task is None or task.done():
            self._llm.release(request_id, is_finished=is_finished)
        else:
            task.add_done_callback(lambda _: self._llm.release(request_id, is_finished=is_finished))

    async def _call(self, message: Call) -> None:
        try:
            if message.method not in CALLS:
                raise EngineStopped(f"there is no call {message.method!r}")
            if message.method == "abort" and (task := self._tasks.get(message.arguments[0])):
                await asyncio.wait([task])  # the engine cannot end what it has not got
            value = await getattr(self._llm, message.method)(*message.arguments)
        except Exception as error:
            self._refuse(message.call_id, error)
        else:
            self._sender.send(Reply(message.call_id, value))

    def _refuse(self, call_id: int, error: Exception) -> None:
        """Answer a call with its error; one that nobody foresaw must not leave it waiting."""
        if not isinstance(error, JaxPagedError):
            log.error("a call failed", exc_info=error)
            error = InvariantError("internal error; the server's log has the cause")
        self._sender.send(Refusal.of(error, call_id=call_id))

    def _flush_later(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._flush)

    def _flush(self) -> None:
        if self._sender.flush():
            self._loop.remove_writer(self._sock)


def main(make: "Callable[[Start], AsyncLLM] | None" = None) -> int:
    """Load what the first message says, and serve it. `make` stands in for the loading in tests."""
    follow_the_front()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        start = read_start(sock)
        logging.basicConfig(
            level=start.log_level.upper(), format="%(asctime)s %(levelname)s engine: %(message)s"
        )
        logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every device it lacks
        try:
            llm = (make or _load)(start)
        except JaxPagedError as error:
            sock.sendall(frame(Refusal.of(error)))
            return EXIT_SETTINGS
        code = asyncio.run(_serve(llm, sock))
    llm.close()
    return code


async def _serve(llm: "AsyncLLM", sock: socket.socket) -> int:
    return await Worker(llm, sock).run()


def _load(start: Start) -> "AsyncLLM":
    from jaxpaged.engine.async_engine import AsyncLLM  # brings JAX, which takes seconds

    return AsyncLLM.from_config(start.config, show_progress=start.show_progress)


def follow_the_front() -> None:
    """End with the front and not before it: signals are its to act on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_start(sock: socket.socket) -> Start:
    frames = Frames()
    while data := sock.recv(READ_BYTES):
        for message in frames.feed(data):
            start = to_engine.decode(message)
            assert isinstance(start, Start)
            return start
    sys.exit(EXIT_DONE)  # the front has gone


if __name__ == "__main__":
    sys.exit(main())
