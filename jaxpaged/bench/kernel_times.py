"""What a GPU did and when, kernel by kernel, from the trace that JAX's own profiler writes."""

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import jax

from jaxpaged.core.plan import StepPlan
from jaxpaged.errors import ConfigError

HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")  # they run beside the kernels and count as neither


@dataclass(frozen=True)
class KernelRun:
    """One run of a kernel, in microseconds since some moment."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Idle:
    """Where the time of some whole steps went, in microseconds."""

    steps: int
    span: float
    busy: float  # at least one kernel runs
    between: float  # the largest gaps, as many as there are steps


class DeviceTrace:
    """Records the GPU's kernels from `start` to `stop`; the host's own events are left out."""

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder.name, profiler_options=options)

    def stop(self) -> list[KernelRun]:
        """The kernels in order of their start; none where the profiler sees no GPU."""
        jax.profiler.stop_trace()
        runs: list[KernelRun] = []
        for file in Path(self._folder.name).rglob("*.trace.json.gz"):
            runs += kernel_runs(json.loads(gzip.decompress(file.read_bytes())))
        self._folder.cleanup()
        return sorted(runs, key=lambda run: run.start)


def kernel_times(function: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Run `function` under the profiler: launches and microseconds by kernel name, largest first.

    Empty where the profiler sees no device, as on a CPU.
    """
    trace = DeviceTrace()
    trace.start()
    try:
        jax.block_until_ready(function())
    finally:
        runs = trace.stop()
    return sums_by_name(runs)


def sums_by_name(runs: Iterable[KernelRun]) -> dict[str, tuple[int, float]]:
    """Launches and microseconds by kernel name, largest first."""
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for run in runs:
        count, micros = totals[run.name]
        totals[run.name] = (count + 1, micros + run.end - run.start)
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


class StepWindow:
    """Told of every step that starts: traces those from `first` up to `end`, counted from 0."""

    def __init__(self, first: int, end: int):
        self._first, self._end, self._count, self._trace = first, end, 0, DeviceTrace()
        self.runs: list[KernelRun] = []
        self._steps: list[tuple[int, int, int]] = []

    def __call__(self, plan: StepPlan) -> None:
        if self._count == self._first:
            self._trace.start()
        elif self._count == self._end:
            self.runs = self._trace.stop()
        if self._first <= self._count < self._end:
            step = plan.num_rows, plan.num_tokens, sum(plan.columns.starts)
            self._steps.append(step)
        self._count += 1

    def means(self) -> dict[str, float]:
        """Of a step: rows, tokens, tokens of KV before these, microseconds of kernels.

        Raises:
            ConfigError: there were not so many steps.
        """
        if self._count <= self._end:
            raise ConfigError(
                f"--traced-steps {self._first}:{self._end}: the workload has {self._count} steps; "
                "end before the last one"
            )
        rows, tokens, seen = (round(fmean(column), 1) for column in zip(*self._steps, strict=True))
        busy = sum([run.end - run.start for run in self.runs]) / len(self._steps)
        decodes = sum([step[0] == step[1] for step in self._steps])
        line = {"steps": len(self._steps), "decodes": decodes, "rows": rows, "tokens": tokens}
        return line | {"kv_tokens": seen, "kernels_us": round(busy, 1)}


def kernel_runs(trace: dict[str, Any]) -> list[KernelRun]:
    """What ran on the streams of the GPUs of a trace in Chrome's format."""
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    return [
        KernelRun(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("ph") == "X"
        and "/device:GPU" in processes.get(e["pid"], "")
        and threads.get((e["pid"], e["tid"]), "").startswith("Stream")
    ]


def idle_time(runs: Sequence[KernelRun], num_steps: int, skip: int) -> Idle | None:
    """Idle time over whole steps: a trace of about `num_steps` equal ones, less the first `skip`.

    A kernel that runs once a step, or a few times, marks where each begins. None without kernels.
    """
    kernels = [run for run in runs if not run.name.startswith(HOST_COPIES)]
    starts = _step_starts(kernels, num_steps)[skip:]
    if len(starts) < 2:
        return None
    gaps, end = [], starts[0]
    for run in kernels:
        if starts[0] <= run.start < starts[-1]:
            gaps.append(max(run.start - end, 0.0))
            end = max(end, run.end)
    gaps.append(max(starts[-1] - end, 0.0))
    span, steps = starts[-1] - starts[0], len(starts) - 1
    gaps.sort(reverse=True)
    return Idle(steps, span, span - sum(gaps), sum(gaps[:steps]))


def _step_starts(kernels: Sequence[KernelRun], num_steps: int) -> list[float]:
    counts = Counter(run.name for run in kernels)
    often = [name for name, count in counts.items() if count >= num_steps - 2]
    if not often:
        return []
    marker = min(often, key=lambda name: counts[name])
    starts = [run.start for run in kernels if run.name == marker]
    return starts[:: max(1, round(len(starts) / num_steps))]
