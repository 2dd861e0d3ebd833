"""When a thread last got on with a program that was missing: compiling counts as progress."""

import time
from collections.abc import Generator
from contextlib import contextmanager

MOST_COMPILE_S = 900.0  # of one program; from then on it counts as a hang


class CompileClock:
    """Written by the thread that compiles, read by whoever watches it."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._ended = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """A program is loaded or compiled meanwhile."""
        self._begun = time.monotonic()
        try:
            yield
        finally:
            self._ended, self._begun = time.monotonic(), None

    @property
    def last_progress_time(self) -> float:
        """Now, while a program is being compiled; else when the last one was finished."""
        begun = self._begun
        if begun is None:
            return self._ended
        return min(time.monotonic(), begun + MOST_COMPILE_S)
