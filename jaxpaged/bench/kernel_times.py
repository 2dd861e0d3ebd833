"""Where a step's time goes on a GPU: seconds by kernel, from JAX's own profiler."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(function: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Run `function` under the profiler: launches and microseconds by kernel name, largest first.

    Empty where the profiler sees no device, as on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            function()
        totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for file in Path(folder).rglob("*.trace.json.gz"):
            for name, micros in _device_events(json.loads(gzip.decompress(file.read_bytes()))):
                count, total = totals[name]
                totals[name] = (count + 1, total + micros)
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def _device_events(trace: dict[str, Any]) -> list[tuple[str, float]]:
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    return [
        (e["name"], float(e["dur"]))
        for e in events
        if e.get("ph") == "X"
        and "/device:GPU" in processes.get(e["pid"], "")
        and threads.get((e["pid"], e["tid"]), "").startswith("Stream")
    ]
