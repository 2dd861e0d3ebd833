"""An embedding engine in a process of its own: `python -m jaxpaged.engine.pooling.worker FD`."""

import asyncio
import dataclasses
import socket
import sys
from functools import partial

from jaxpaged.engine.front_link import FrontLink, serve_front
from jaxpaged.engine.pooling.inputs import EncodedText
from jaxpaged.engine.pooling.threaded import AsyncPooling
from jaxpaged.engine.wire import Beat, Call, Ready, Release, Start, ToEngine
from jaxpaged.metrics import NO_LOAD


class PoolingWorker(FrontLink):
    """The link of an embedding engine."""

    name = "embedding engine"

    def __init__(self, pooling: AsyncPooling, sock: socket.socket):
        super().__init__(sock)
        self._pooling = pooling
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def ready(self) -> Ready:
        pooling, model = self._pooling, self._pooling.model
        told, parts = dataclasses.asdict(model), pooling.parts
        sizes = model.vocab, model.max_len
        return Ready(parts.config, *sizes, told, NO_LOAD, parts.device_share)

    def beat(self) -> Beat | None:
        pooling = self._pooling
        if not pooling.is_running:
            return None
        return Beat(pooling.seconds_without_progress, pooling.parts.engine.has_work, NO_LOAD)

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Call):
            name = str(message.call_id)
            task = asyncio.create_task(self.answer(message.call_id, partial(self._call, message)))
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        elif isinstance(message, Release):
            task = self._tasks.get(message.request_id)
            if task is not None:
                task.cancel()

    async def _call(self, message: Call) -> bytes:
        if message.method == "metrics_text":
            return await self._pooling.metrics_text()
        ids, seconds, is_background = message.arguments
        texts = [EncodedText(text, second) for text, second in zip(ids, seconds, strict=True)]
        results = await self._pooling.run(texts, is_background=is_background)
        return results.tobytes()


def _load(start: Start) -> AsyncPooling:
    return AsyncPooling.from_config(start.config)


if __name__ == "__main__":
    sys.exit(serve_front("embedding", _load, PoolingWorker))
