"""The compiled programs of one model and one page pool: from disk, or lowered and compiled."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.engine.compile_clock import CompileClock
from jaxpaged.engine.executables import ExecutableStore
from jaxpaged.engine.lowering import LoweringProcesses, lower_exported
from jaxpaged.engine.program_source import Program, ProgramSource

log = logging.getLogger(__name__)

FEWEST_FOR_PROCESSES = 12  # programs to lower; for fewer, processes take longer to start


class Programs:
    """Gives finished programs by what they are for. Safe for use by several threads.

    Args:
        start_processes: gives so many processes that lower programs, or None where they cannot be
            told what to lower.
    """

    def __init__(
        self,
        source: ProgramSource,
        store: ExecutableStore,
        start_processes: Callable[[int], LoweringProcesses] | None = None,
    ):
        self.source, self._store, self._start_processes = source, store, start_processes
        self._finished: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.clock = CompileClock()  # of programs that were not there when they were wanted
        self.compilations: list[tuple[str, float]] = []  # names and seconds, lowering left out
        self.num_loaded = 0

    def forward(self, bucket: Bucket) -> Any:
        return self._finished.get(bucket.forward_name) or self._get(self.source.forward(bucket))

    def sample(self, bucket: Bucket) -> Any:
        return self._finished.get(bucket.sample_name) or self._get(self.source.sample(bucket))

    def chain(self, bucket: Bucket, num_steps: int) -> Any:
        name = bucket.chain_name(num_steps)
        return self._finished.get(name) or self._get(self.source.chain(bucket, num_steps))

    def reset(self, length: int) -> Any:
        """The program for a history of `length` tokens or fewer, and its padded length."""
        padded = next(n for n in self.source.reset_lengths if n >= length)
        return self._finished.get(f"reset {padded}") or self._get(self.source.reset(padded)), padded

    def page(self, kind: str, width: int) -> Any:
        """The program that moves `width` pages: copy, fetch or store."""
        return self._finished.get(f"{kind} {width}") or self._get(self.source.page(kind, width))

    def warm_up(self, ladder: BucketLadder, notice: Callable[[int, int], None]) -> None:
        """Load every program, and compile in parallel what is not there.

        `notice(done, total)` is called after each. Lowering holds the interpreter's lock, so for
        many programs it happens in processes of its own.
        """
        programs = self.source.all_programs(ladder)
        with ThreadPoolExecutor(_num_threads()) as pool:
            found = pool.map(self._load, programs)
            missing = [
                make for make, there in zip(programs.values(), found, strict=True) if not there
            ]
            notice(len(programs) - len(missing), len(programs))
            processes = None
            if self._start_processes and len(missing) >= FEWEST_FOR_PROCESSES:
                processes = self._start_processes(num_processes())
            try:
                futures = [pool.submit(self._compile_with, processes, make) for make in missing]
                for done, future in enumerate(futures, 1 + len(programs) - len(missing)):
                    future.result()
                    notice(done, len(programs))
            finally:
                if processes:
                    processes.close()

    def temp_bytes(self) -> dict[str, int]:
        """What each finished program needs while it runs, beside its arguments and results."""
        analysed = {name: program.memory_analysis() for name, program in self._finished.items()}
        return {name: found.temp_size_in_bytes for name, found in analysed.items() if found}

    def clear(self) -> None:
        self._finished.clear()

    def _get(self, program: Program) -> Any:
        with self.clock.running():
            if not self._load(program.name):
                self._compile(program)
        return self._finished[program.name]

    def _load(self, name: str) -> bool:
        compiled = self._store.load(name)
        if compiled is None:
            return False
        with self._lock:
            self.num_loaded += 1
            self._finished[name] = compiled
        return True

    def _compile_with(
        self, processes: LoweringProcesses | None, make: Callable[[], Program]
    ) -> None:
        program = make()
        exported = processes.lower(program.name) if processes else None
        lowered = None
        if exported is not None:
            tree = jax.tree.structure(program.result)
            lowered = lower_exported(exported, program.arguments, tree, program.donated)
        self._compile(program, lowered)

    def _compile(self, program: Program, lowered: Any = None) -> None:
        start = time.monotonic()
        compiled = program.compile(lowered)
        seconds = time.monotonic() - start
        with self._lock:
            self.compilations.append((program.name, seconds))
            self._finished[program.name] = compiled
        log.debug("compiled %s in %.1f s", program.name, seconds)
        self._store.save(program.name, compiled)


def num_processes() -> int:
    """That lower beside the threads that compile."""
    return max(1, _num_threads() // 2)


def _num_threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))
