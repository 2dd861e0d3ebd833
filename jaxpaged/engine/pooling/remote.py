"""`RemotePooling`: an embedding engine in a process of its own, at the end of a socket pair.

Speaks the messages of `engine/wire.py`: a call `run` with token ids is answered by the numbers'
bytes, and a release of its id drops it. Knows no device.
"""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxpaged.config.pooling import PoolingModel
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.connection import EngineConnection
from jaxpaged.engine.pooling.inputs import EncodedText, PoolingInputs
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.texts import tokenizer_for
from jaxpaged.engine.wire import Call, Ready, Release, Start
from jaxpaged.errors import EngineStopped
from jaxpaged.weights.resolve import find_checkpoint

WORKER = "jaxpaged.engine.pooling.worker"
CLOSE_S = 4.0  # for the process to end by itself


class RemotePooling(ServedPooling):
    """Serves many callers of one event loop, in which it is made and used."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        connection: EngineConnection,
        ready: Ready,
        inputs: PoolingInputs,
    ):
        super().__init__(inputs, ready.config)
        self._process, self._sock, self._connection = process, sock, connection

    @classmethod
    async def start(
        cls, config: EngineConfig, *, log_level: str = "info", module: str = WORKER
    ) -> "RemotePooling":
        """Start the process and wait until its model is loaded and all is compiled.

        Raises:
            ConfigError, WeightsError: as the loading itself.
            EngineStopped: the process ended without a word.
        """
        given = config.model
        found = await asyncio.to_thread(
            find_checkpoint, given.model, given.load_format, given.revision
        )
        names = given.served_model_name or (given.model,)
        model = dataclasses.replace(given, model=str(found.path), served_model_name=names)
        config = dataclasses.replace(config, model=model)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(EngineConnection, sock=ours)
        try:
            connection.send(Start(config, log_level, False))
            tokenizer = await asyncio.to_thread(tokenizer_for, model, Path(model.model))
            ready = await connection.ready
        except BaseException:
            process.kill()
            process.wait()
            raise
        told = msgspec.convert(ready.default_sampling, PoolingModel)
        return cls(process, ours, connection, ready, PoolingInputs(tokenizer, told))

    @property
    def is_running(self) -> bool:
        return self._connection.error is None

    @property
    def seconds_without_progress(self) -> float:
        connection = self._connection
        return time.monotonic() - connection.progress_at if connection.has_work else 0.0

    async def run(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        ids, seconds = [text.token_ids for text in texts], [text.second_from for text in texts]
        data = await self._call("run", ids, seconds)
        return np.frombuffer(data, np.float32).reshape(len(texts), self.model.size)

    async def metrics_text(self) -> bytes:
        return await self._call("metrics_text")

    def give_up(self, reason: str) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)  # works also in a hang of native code
        self._connection.fail(EngineStopped(reason))

    def close(self) -> None:
        """End the process; by force where it does not end itself."""
        with contextlib.suppress(OSError):  # closed already
            self._sock.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _call(self, method: str, *arguments: Any) -> Any:
        call_id, answer = self._connection.next_call()
        self._connection.send(Call(call_id, method, list(arguments)))
        try:
            return await answer
        except asyncio.CancelledError:  # the client has left
            self._connection.send(Release(str(call_id), False))
            raise
