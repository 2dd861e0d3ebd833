"""The thread that an engine runs in: commands from its callers, then a step, and so on."""

import asyncio
import faulthandler
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jaxpaged.errors import EngineStopped

log = logging.getLogger(__name__)


class Steppable[T](Protocol):
    """What the thread needs of an engine."""

    @property
    def last_progress_time(self) -> float: ...

    @property
    def has_work(self) -> bool: ...

    def step(self) -> list[T]: ...


class EngineThread[T]:
    """Runs an engine until it raises or is stopped; sleeps while there is nothing to do.

    Args:
        deliver: takes what a step gave, if anything; called by the thread.
        fail_all: tells all callers that nothing more will come; called in their event loop.
        explain: a better error for one that the engine raised, or None.
    """

    def __init__(
        self,
        name: str,
        engine: Steppable[T],
        deliver: Callable[[list[T]], None],
        fail_all: Callable[[EngineStopped], None],
        explain: Callable[[BaseException], BaseException | None] = lambda error: None,
    ):
        self._engine, self._deliver = engine, deliver
        self._report, self._explain = fail_all, explain
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._busy_since = time.monotonic()  # when it last woke from having nothing to do
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._error is None and not self._closing and self._thread.is_alive()

    @property
    def seconds_without_progress(self) -> float:
        """Since a step was last read or a program compiled, while there is work; 0 while idle."""
        if not self._engine.has_work:
            return 0.0
        return max(0.0, time.monotonic() - max(self._engine.last_progress_time, self._busy_since))

    def check_running(self) -> None:
        """Take the running event loop for the callers', which a call comes from.

        Raises:
            EngineStopped: nobody would answer it.
        """
        if not self.is_running:
            raise self._stopped()
        self._loop = asyncio.get_running_loop()

    def send(self, command: Callable[[], object]) -> None:
        """Have the thread do something before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def tell(self, function: Callable[[], Any]) -> None:
        """Run `function` in the callers' event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def give_up(self, reason: str) -> None:
        """Fail all that is open, and write the stacks of all threads to stderr."""
        faulthandler.dump_traceback(all_threads=True)
        self._error = self._error or EngineStopped(reason)
        self._fail_all()

    def stop(self) -> None:
        """End after the present step; the engine itself can be used again."""
        self._closing = True
        with self._wake:
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._wake:
                    while not (self._commands or self._engine.has_work or self._closing):
                        self._wake.wait()
                        self._busy_since = time.monotonic()
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_work and not self._closing and (given := self._engine.step()):
                    self._deliver(given)
        except BaseException as error:
            log.exception("the %s has stopped", self._thread.name)
            self._error = self._explain(error) or error
            self.tell(self._fail_all)

    def _fail_all(self) -> None:
        self._report(self._stopped())

    def _stopped(self) -> EngineStopped:
        return EngineStopped(f"the engine has stopped: {self._error or 'closed'}")
