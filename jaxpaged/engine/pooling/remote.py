"""`RemotePooling`: an embedding engine in a process of its own, at the end of a socket pair.

Speaks the messages of `engine/wire.py`: a call `run` with token ids is answered by the numbers'
bytes, and a release of its id drops it. Knows no device.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxpaged.config.pooling import PoolingModel
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.engine_process import STARTUP_S, EngineProcess, with_place
from jaxpaged.engine.pooling.inputs import EncodedText, PoolingInputs
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.texts import tokenizer_for
from jaxpaged.engine.wire import Call, Release, Start

WORKER = "jaxpaged.engine.pooling.worker"


class RemotePooling(ServedPooling):
    """Serves many callers of one event loop, in which it is made and used."""

    def __init__(self, process: EngineProcess, inputs: PoolingInputs):
        super().__init__(inputs, process.ready.config)
        self._process, self._connection = process, process.connection
        self.device_share = process.ready.device_share

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        module: str = WORKER,
        startup_s: float = STARTUP_S,
    ) -> "RemotePooling":
        """Start the process and wait until its model is loaded and all is compiled.

        Raises:
            ConfigError, WeightsError: as the loading itself.
            EngineStopped: the process ended without a word.
        """
        config = await with_place(config)
        model = config.model
        tokenizing = asyncio.to_thread(tokenizer_for, model, Path(model.model))
        process, tokenizer = await EngineProcess.open(
            module, Start(config, log_level, False), tokenizing, startup_s
        )
        told = msgspec.convert(process.ready.default_sampling, PoolingModel)
        return cls(process, PoolingInputs(tokenizer, told))

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def seconds_without_progress(self) -> float:
        connection = self._connection
        return time.monotonic() - connection.progress_at if connection.has_work else 0.0

    async def run(
        self, texts: Sequence[EncodedText], *, is_background: bool = False
    ) -> NDArray[np.float32]:
        ids, seconds = [text.token_ids for text in texts], [text.second_from for text in texts]
        call_id, answer = self._connection.next_call()
        self._connection.send(Call(call_id, "run", [ids, seconds, is_background]))
        try:
            data = await answer
        except asyncio.CancelledError:  # the client has left
            self._connection.send(Release(str(call_id), False))
            raise
        return np.frombuffer(data, np.float32).reshape(len(texts), self.model.size)

    async def metrics_text(self) -> bytes:
        return await self._process.call("metrics_text")

    def give_up(self, reason: str) -> None:
        self._process.give_up(reason)

    def close(self) -> None:
        self._process.close()
