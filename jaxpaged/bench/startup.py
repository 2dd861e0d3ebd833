"""`jaxpaged bench startup`: process start to ready, in a process of its own, cold and warm."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxpaged.bench.report import Report
from jaxpaged.bench.targets import STARTUP_S
from jaxpaged.errors import ConfigError, JaxPagedError

_CHILD = """
import sys, time, json
from jaxpaged.config.flags import ArgumentParser, add_engine_flags, config_from_args
from jaxpaged.engine.factory import build_engine
parser = ArgumentParser()
add_engine_flags(parser)
parts = build_engine(config_from_args(parser.parse_args()), warm=True)
runner = parts.engine.runner
print(json.dumps({
    "ready": time.monotonic(),
    "phases": parts.phases_s,
    "compiled": runner.compilations,
    "loaded": runner.num_loaded,
}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="directory, GGUF file or hub id")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--label", default="")
    parser.add_argument("--engine-args", default="", help="more flags of the engine, one string")
    parser.add_argument(
        "--compile-cache-dir", type=Path, help="keep the programs here; must be new or empty"
    )


def run(args: argparse.Namespace, report: Report) -> None:
    """Start twice with one new cache folder: the first finds it empty, the second full.

    Raises:
        ConfigError: a `--compile-cache-dir` that is not empty.
        JaxPagedError: a start that failed.
    """
    kept: Path | None = args.compile_cache_dir
    if kept is not None and kept.is_dir() and any(kept.iterdir()):
        raise ConfigError(f"--compile-cache-dir: {kept} is not empty; name a new folder")
    with tempfile.TemporaryDirectory() as folder:
        programs = kept or Path(folder)
        for state in ("cold", "warm"):
            start = time.monotonic()
            command = [sys.executable, "-c", _CHILD, "--model", args.model]
            command += ["--load-format", args.load_format, "--compile-cache-dir", str(programs)]
            command += args.engine_args.split()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                raise JaxPagedError(f"the {state} start failed: {last[0]}")
            told = json.loads(done.stdout.strip().splitlines()[-1])
            seconds = told["ready"] - start  # by the clock that all processes share
            line: dict[str, Any] = {"cache": state, "seconds": round(seconds, 2)}
            target = STARTUP_S.get((args.label, state))
            line |= {} if target is None else target.columns()
            line |= {name: round(s, 2) for name, s in told["phases"].items()}
            compiled = sorted(told["compiled"], key=lambda one: -one[1])
            line |= {"compiled": len(compiled), "loaded": told["loaded"]}
            if compiled:  # seconds of all threads together, those that a thread waited included
                line["compile_s"] = round(sum(seconds for _, seconds in compiled), 1)
                line["slowest"] = ", ".join(f"{name} {s:.1f} s" for name, s in compiled[:5])
            report.add(args.label or args.model, line)
