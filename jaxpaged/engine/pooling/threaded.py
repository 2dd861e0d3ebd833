"""`AsyncPooling`: an embedding engine in a thread of its own."""

import asyncio
import faulthandler
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.pooling.engine import PoolingCall
from jaxpaged.engine.pooling.factory import PoolingParts, build_pooling_engine
from jaxpaged.engine.pooling.inputs import EncodedText
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.errors import EngineStopped, QueueFull

log = logging.getLogger(__name__)


class AsyncPooling(ServedPooling):
    """Serves many callers of one event loop."""

    def __init__(self, parts: PoolingParts):
        super().__init__(parts.inputs, parts.config)
        self._parts, self._engine = parts, parts.engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._calls: dict[int, asyncio.Future[NDArray[np.float32]]] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._busy_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pooling", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: EngineConfig) -> "AsyncPooling":
        """Load everything and compile every bucket; ready when it returns."""
        return cls(build_pooling_engine(config, warm=True))

    @property
    def parts(self) -> PoolingParts:
        return self._parts

    @property
    def is_running(self) -> bool:
        return self._error is None and not self._closing and self._thread.is_alive()

    @property
    def seconds_without_progress(self) -> float:
        if not self._engine.has_work:
            return 0.0
        return max(0.0, time.monotonic() - max(self._engine.last_step_time, self._busy_since))

    async def run(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        if not self.is_running:
            raise EngineStopped(f"the engine has stopped: {self._error or 'closed'}")
        if not texts:
            return np.zeros((0, self.model.size), np.float32)
        self._check_room()
        self._loop = asyncio.get_running_loop()
        call_id, future = next(self._ids), self._loop.create_future()
        ids, seconds = [text.token_ids for text in texts], [text.second_from for text in texts]
        self._calls[call_id] = future
        self._send(lambda: self._engine.add(call_id, ids, seconds))
        try:
            return await future
        finally:
            if self._calls.pop(call_id, None) is not None:
                self._send(lambda: self._engine.drop(call_id))

    async def metrics_text(self) -> bytes:
        return self._engine.metrics.text()

    def give_up(self, reason: str) -> None:
        faulthandler.dump_traceback(all_threads=True)
        self._error = self._error or EngineStopped(reason)
        self._fail_all()

    def close(self) -> None:
        self._closing = True
        with self._wake:
            self._wake.notify()
        self._thread.join()
        self._engine.close()

    def _check_room(self) -> None:
        most, waiting = self._parts.config.scheduler.max_num_queued_reqs, self._engine.num_waiting
        if most is not None and waiting >= most:
            self._engine.metrics.rejected("max_num_queued_reqs")
            raise QueueFull(f"{waiting} texts wait, at most {most} may")

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        """Commands, a step, its results; sleeps when there is nothing to do."""
        try:
            while not self._closing:
                with self._wake:
                    while not (self._commands or self._engine.has_work or self._closing):
                        self._wake.wait()
                        self._busy_since = time.monotonic()
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_work and not self._closing:
                    done = self._engine.step()
                    if done:
                        self._tell(lambda done=done: self._settle(done))
        except BaseException as error:
            log.exception("the embedding engine has stopped")
            self._error = error
            self._tell(self._fail_all)

    def _settle(self, done: list[PoolingCall]) -> None:
        for call in done:
            future = self._calls.pop(call.call_id, None)
            if future is None or future.done():
                continue
            if call.error is None:
                future.set_result(call.results)
            else:
                future.set_exception(call.error)

    def _tell(self, function: Callable[[], Any]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _fail_all(self) -> None:
        stopped = EngineStopped(f"the engine has stopped: {self._error}")
        for future in self._calls.values():
            if not future.done():
                future.set_exception(stopped)
