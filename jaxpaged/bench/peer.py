"""`jaxpaged bench peer`: the four workloads for several models, each in a process of its own.

Weights are random, in the shape of each model's configuration. A process of its own gives all of
the GPU's memory back. Engine settings are those of the peer's runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxpaged.bench.report import Report
from jaxpaged.errors import ConfigError, JaxPagedError

MODELS = "llama3-8b,qwen2.5-7b,qwen2.5-0.5b,llama2-13b"
PEER_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --max-model-len 4096 --max-num-seqs 256 "
    "--gpu-memory-utilization 0.85 --no-enable-prefix-caching"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=MODELS, help="labels, comma-separated")
    parser.add_argument(
        "--configs",
        type=Path,
        default=Path("benchmarks/configs"),
        help="folder with a configuration for each label",
    )
    parser.add_argument("--workloads", default="latency,decode,prefill,mixed")
    parser.add_argument("--runs", type=int, default=2, help="runs of each; latency takes five")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of a model; then each workload runs once"
    )
    parser.add_argument("--engine-args", default="", help="more flags of the engine, one string")


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure one model after another; a model that fails does not stop the next.

    Raises:
        ConfigError: a label without a configuration; nothing was started.
        JaxPagedError: at the end, for the models that failed.
    """
    folders = {label: args.configs / label for label in args.models.split(",")}
    for label, folder in folders.items():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--models: {label} has no {folder}/config.json: see --configs")
    failed = []
    for label, folder in folders.items():
        start = time.monotonic()
        problem = _measure(label, folder, args, report)
        report.take({"model": label, "process_s": round(time.monotonic() - start, 1)})
        if problem:
            failed.append(f"{label}: {problem}")
    if failed:
        raise JaxPagedError("; ".join(failed))


def _measure(label: str, folder: Path, args: argparse.Namespace, report: Report) -> str:
    """Pass on a child's lines as they come; the last line of its errors if it failed."""
    command = [sys.executable, "-m", "jaxpaged.bench", "throughput", "--model", str(folder)]
    command += ["--label", label, "--workloads", args.workloads]
    command += ["--runs", str(args.runs), "--seconds", str(args.seconds)]
    command += PEER_FLAGS.split() + args.engine_args.split()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):  # the rest is the child's own table
                report.take(json.loads(line))
        code = child.wait()
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:] or [f"exit code {code}"]
    return last[0] if code else ""
