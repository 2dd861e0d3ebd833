"""`AsyncPooling`: an embedding engine in a thread of its own."""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.engine_thread import EngineThread
from jaxpaged.engine.pooling.engine import PoolingCall
from jaxpaged.engine.pooling.factory import PoolingParts, build_pooling_engine
from jaxpaged.engine.pooling.inputs import EncodedText
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.errors import EngineStopped, QueueFull


class AsyncPooling(ServedPooling):
    """Serves many callers of one event loop."""

    def __init__(self, parts: PoolingParts):
        super().__init__(parts.inputs, parts.config)
        self._parts, self._engine = parts, parts.engine
        self._calls: dict[int, asyncio.Future[NDArray[np.float32]]] = {}
        self._ids = itertools.count()
        self._thread = EngineThread("embedding engine", parts.engine, self._deliver, self._fail_all)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "AsyncPooling":
        """Load everything and compile every bucket; ready when it returns."""
        return cls(build_pooling_engine(config, warm=True))

    @property
    def parts(self) -> PoolingParts:
        return self._parts

    @property
    def is_running(self) -> bool:
        return self._thread.is_running

    @property
    def seconds_without_progress(self) -> float:
        return self._thread.seconds_without_progress

    async def run(
        self, texts: Sequence[EncodedText], *, is_background: bool = False
    ) -> NDArray[np.float32]:
        self._thread.check_running()
        if not texts:
            return np.zeros((0, self.model.size), np.float32)
        self._check_room(is_background)
        call_id, future = next(self._ids), asyncio.get_running_loop().create_future()
        ids, seconds = [text.token_ids for text in texts], [text.second_from for text in texts]
        self._calls[call_id] = future
        self._thread.send(
            lambda: self._engine.add(call_id, ids, seconds, is_background=is_background)
        )
        try:
            return await future
        finally:
            if self._calls.pop(call_id, None) is not None:
                self._thread.send(lambda: self._engine.drop(call_id))

    async def metrics_text(self) -> bytes:
        return self._engine.metrics.text()

    def give_up(self, reason: str) -> None:
        self._thread.give_up(reason)

    def close(self) -> None:
        self._thread.stop()
        self._engine.close()

    def _check_room(self, is_background: bool) -> None:
        """What waits in the background keeps nobody else out."""
        most = self._parts.config.scheduler.max_num_queued_reqs
        waiting = self._engine.num_waiting if is_background else self._engine.num_live
        if most is not None and waiting >= most:
            self._engine.metrics.rejected("max_num_queued_reqs")
            raise QueueFull(f"{waiting} texts wait, at most {most} may")

    def _deliver(self, done: list[PoolingCall]) -> None:
        self._thread.tell(lambda: self._settle(done))

    def _settle(self, done: list[PoolingCall]) -> None:
        for call in done:
            future = self._calls.pop(call.call_id, None)
            if future is None or future.done():
                continue
            if call.error is None:
                future.set_result(call.results)
            else:
                future.set_exception(call.error)

    def _fail_all(self, stopped: EngineStopped) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(stopped)
