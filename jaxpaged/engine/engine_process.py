"""An engine's process as its front holds it. Knows no device and never imports JAX."""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable
from typing import Any

from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.connection import EngineConnection
from jaxpaged.engine.wire import Call, Ready, Start
from jaxpaged.errors import EngineStopped
from jaxpaged.weights.resolve import find_checkpoint

CLOSE_S = 4.0  # for the process to end by itself
DUMP_S = 0.5  # likewise, for one that hangs: enough to write its stacks
STARTUP_S = 3600.0  # for a model to be loaded, where the caller says nothing


async def with_place(config: EngineConfig) -> EngineConfig:
    """The configuration with its model found, or fetched, and named."""
    given = config.model
    place = given.revision, given.download_dir
    found = await asyncio.to_thread(find_checkpoint, given.model, given.load_format, *place)
    names = given.served_model_name or (given.model,)
    model = dataclasses.replace(given, model=str(found.path), served_model_name=names)
    return dataclasses.replace(config, model=model)


class EngineProcess:
    """A process and the socket to it; used in the event loop in which it was opened."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        connection: EngineConnection,
        ready: Ready,
    ):
        self._process, self._sock = process, sock
        self.connection, self.ready = connection, ready
        self._patience_s = CLOSE_S

    @classmethod
    async def open[T](
        cls, module: str, start: Start, meanwhile: Awaitable[T], limit_s: float = STARTUP_S
    ) -> tuple["EngineProcess", T]:
        """Start `python -m module` and wait until its model is loaded, and for `meanwhile`.

        A process that is not ready within `limit_s` writes its stacks to stderr and is ended.

        Raises:
            ConfigError, WeightsError: as the loading itself.
            EngineStopped: the process ended without a word, or was not ready in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(EngineConnection, sock=ours)
        try:
            connection.send(start)
            found = await meanwhile
            ready = await _within(limit_s, process, connection)
        except BaseException as error:
            connection.ready.add_done_callback(lambda late: late.cancelled() or late.exception())
            if isinstance(error, EngineStopped):  # it is writing why it ends
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, CLOSE_S)
            process.kill()
            process.wait()
            raise
        return cls(process, ours, connection, ready), found

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as is known."""
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        return self.connection.error is None

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the engine answers."""
        call_id, answer = self.connection.next_call()
        self.connection.send(Call(call_id, method, list(arguments)))
        return await answer

    def give_up(self, reason: str) -> None:
        """Fail all that is open, and have the process write its stacks to stderr, then end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)  # works also in a hang of native code
            self._patience_s = DUMP_S
        self.connection.fail(EngineStopped(reason))

    def close(self) -> None:
        """End the process; by force where it does not end itself."""
        with contextlib.suppress(OSError):  # closed already
            self._sock.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _within(
    limit_s: float, process: subprocess.Popen[bytes], connection: EngineConnection
) -> Ready:
    """What the process says once its model is loaded.

    Raises:
        EngineStopped: it took too long, and its stacks are in stderr.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(connection.ready)
    except TimeoutError:
        process.send_signal(signal.SIGUSR1)  # works also in a hang of native code
        await asyncio.sleep(DUMP_S)
        process.kill()
        raise EngineStopped(
            f"the engine's process was not ready within {limit_s:g} s; its stacks are above"
        ) from None
