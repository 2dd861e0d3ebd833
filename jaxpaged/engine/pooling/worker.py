"""An embedding engine in a process of its own: `python -m jaxpaged.engine.pooling.worker FD`."""

import asyncio
import dataclasses
import logging
import socket
import sys

from jaxpaged.engine.pooling.inputs import EncodedText
from jaxpaged.engine.pooling.threaded import AsyncPooling
from jaxpaged.engine.wire import (
    Beat,
    Call,
    Frames,
    Ready,
    Refusal,
    Release,
    Reply,
    ToEngine,
    frame,
    to_engine,
)
from jaxpaged.engine.worker import (
    BEAT_S,
    EXIT_DONE,
    EXIT_SETTINGS,
    EXIT_STOPPED,
    READ_BYTES,
    Sender,
    follow_the_front,
    read_start,
)
from jaxpaged.errors import EngineStopped, InvariantError, JaxPagedError
from jaxpaged.metrics import EngineLoad

log = logging.getLogger(__name__)

NO_LOAD = EngineLoad(0, 0, 0.0, 0, 0, 0, 0)


class PoolingWorker:
    """Does what the front asks, until the front or the engine is gone."""

    def __init__(self, pooling: AsyncPooling, sock: socket.socket):
        self._pooling, self._sock = pooling, sock
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(sock, self._flush_later)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Serve; the exit code."""
        self._sock.setblocking(False)
        pooling, model = self._pooling, self._pooling.model
        told = dataclasses.asdict(model)
        self._sender.send(Ready(pooling.parts.config, model.vocab, model.max_len, told, NO_LOAD))
        reading, beating = asyncio.create_task(self._read()), asyncio.create_task(self._beat())
        done, _ = await asyncio.wait({reading, beating}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        beating.cancel()
        if reading in done:
            return EXIT_DONE
        self._sender.send(Refusal.of(EngineStopped("the embedding engine has stopped")))
        return EXIT_STOPPED

    async def _read(self) -> None:
        frames = Frames()
        while data := await self._loop.sock_recv(self._sock, READ_BYTES):
            for message in frames.feed(data):
                self._take(to_engine.decode(message))

    async def _beat(self) -> None:
        pooling = self._pooling
        while pooling.is_running:
            has_work = pooling.parts.engine.has_work
            self._sender.send(Beat(pooling.seconds_without_progress, has_work, NO_LOAD))
            await asyncio.sleep(BEAT_S)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Call):
            name = str(message.call_id)
            task = self._tasks[name] = self._loop.create_task(self._answer(message))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        elif isinstance(message, Release):
            task = self._tasks.get(message.request_id)
            if task is not None:
                task.cancel()

    async def _answer(self, message: Call) -> None:
        try:
            value = await self._call(message)
        except Exception as error:
            if not isinstance(error, JaxPagedError):
                log.error("a call failed", exc_info=error)
                error = InvariantError("internal error; the server's log has the cause")
            self._sender.send(Refusal.of(error, call_id=message.call_id))
        else:
            self._sender.send(Reply(message.call_id, value))

    async def _call(self, message: Call) -> bytes:
        if message.method == "metrics_text":
            return await self._pooling.metrics_text()
        ids, seconds = message.arguments
        pairs = zip(ids, seconds, strict=True)
        results = await self._pooling.run([EncodedText(text, second) for text, second in pairs])
        return results.tobytes()

    def _flush_later(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._flush)

    def _flush(self) -> None:
        if self._sender.flush():
            self._loop.remove_writer(self._sock)


def main() -> int:
    """Load what the first message says, and serve it."""
    follow_the_front()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        start = read_start(sock)
        logging.basicConfig(
            level=start.log_level.upper(), format="%(asctime)s %(levelname)s embedding: %(message)s"
        )
        logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every device it lacks
        try:
            pooling = AsyncPooling.from_config(start.config)
        except JaxPagedError as error:
            sock.sendall(frame(Refusal.of(error)))
            return EXIT_SETTINGS
        code = asyncio.run(_serve(pooling, sock))
    pooling.close()
    return code


async def _serve(pooling: AsyncPooling, sock: socket.socket) -> int:
    return await PoolingWorker(pooling, sock).run()


if __name__ == "__main__":
    sys.exit(main())
