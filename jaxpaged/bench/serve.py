"""`jaxpaged bench serve`: four loads over HTTP on a server that it starts, or on `--base-url`.

Clients are processes of their own. With dummy weights a stand-in tokenizer gives every token id a
word, so that the server does the work of turning tokens into text.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxpaged.bench.report import Report
from jaxpaged.bench.targets import HTTP
from jaxpaged.errors import ConfigError, JaxPagedError

LOADS = {
    "decode": "--workload decode --concurrency 256 --warmup 256",
    "mixed": "--workload mixed --concurrency 256 --warmup 16",
    "open": "--workload mixed --rate 8 --limit 256 --warmup 16",
    "latency": "--workload latency --concurrency 1 --limit 4 --warmup 2 --processes 1",
}
PEER = Path("benchmarks/peer/vllm-http-qwen2.5-7b-h200.jsonl")
SERVER_FLAGS = (
    "--load-format dummy --max-model-len 4096 --max-num-seqs 256 --max-num-batched-tokens 8192 "
    "--gpu-memory-utilization 0.85 --no-enable-prefix-caching --host 127.0.0.1 --log-level warning"
)
LONGEST_START_S = 900.0
LONGEST_STOP_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="benchmarks/configs/qwen2.5-7b", help="to be served")
    parser.add_argument("--base-url", default="", help="a server that runs already, of any make")
    parser.add_argument("--served-model-name", default="model", help="its name in the API")
    parser.add_argument("--vocab", type=int, default=0, help="with --base-url: vocab_size")
    parser.add_argument("--api-key", default="", help="bearer token")
    parser.add_argument("--loads", default=",".join(LOADS), help="names, comma-separated")
    parser.add_argument("--limit", type=int, default=0, help="requests a load (default: its own)")
    parser.add_argument("--peer", type=Path, default=PEER, help="another server's lines to show")
    parser.add_argument("--label", default="jaxpaged", help="names the server in the report")
    parser.add_argument("--server-args", default="", help="more flags of the server, one string")


def run(args: argparse.Namespace, report: Report) -> None:
    """Run the loads in their order; the peer's figures and the goals stand in the same table.

    Raises:
        ConfigError: a load that there is not, or no vocabulary; nothing was started.
        JaxPagedError: the server did not start, or requests failed.
    """
    loads = args.loads.split(",")
    for load in loads:
        if load not in LOADS:
            raise ConfigError(f"--loads: {load!r} is none of {', '.join(LOADS)}")
    vocab = args.vocab or _vocab(Path(args.model), bool(args.base_url))
    failed: list[str] = []
    with _server(args, vocab, report) as url:
        for load in loads:
            line = _measure(load, url, vocab, args)
            report.take(line, row=_row(args.label, load, line))
            if line["failed"] or line["length_mismatch"]:
                failed.append(f"{load}: {line['failed']} of {line['n']} failed {line['errors']}")
    peers = args.peer.read_text(encoding="utf-8").splitlines() if args.peer.is_file() else []
    for line in map(json.loads, peers):
        *name, load = line["label"].split()
        report.show(_row(" ".join(name), load, line))
    for load in loads:
        report.show(_row("goal", load, HTTP[load]))
    if failed:
        raise JaxPagedError("; ".join(failed))


def _measure(load: str, url: str, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxpaged.bench.load_client", "--url", url]
    command += ["--model", args.served_model_name, "--vocab", str(vocab)]
    command += ["--label", f"{args.label} {load}", "--api-key", args.api_key]
    command += LOADS[load].split() + (["--limit", str(args.limit)] if args.limit else [])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise JaxPagedError(f"the client of load {load} failed: {last[0]}")
    return json.loads(done.stdout)


def _row(label: str, load: str, line: dict[str, Any]) -> dict[str, Any]:
    """A load in the columns of the table; empty where nothing is known."""
    row = {"label": label, "load": load, "tok/s": line.get("output_tok_per_s", "")}
    for name, points in {"ttft": ("p50", "p99"), "itl": ("p50", "p99"), "tpot": ("p50",)}.items():
        for point in points:
            row[f"{name}_{point}_ms"] = line.get(f"{name}_ms", {}).get(point, "")
    return row | {name: line.get(name, "") for name in ("ok", "client_cpu_max")}


def _vocab(folder: Path, is_remote: bool) -> int:
    file = folder / "config.json"
    if is_remote or not file.is_file():
        raise ConfigError("--vocab must tell the model's vocab_size, or --model a folder with it")
    return int(json.loads(file.read_text(encoding="utf-8"))["vocab_size"])


@contextmanager
def _server(args: argparse.Namespace, vocab: int, report: Report) -> Iterator[str]:
    """The URL of a ready server; one that was started here is told to end, and waited for."""
    if args.base_url:
        yield args.base_url
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        stand_in_tokenizer(vocab).save(f"{folder}/tokenizer.json")
        port = _free_port()
        command = [sys.executable, "-m", "server", args.model, "--port", str(port)]
        command += ["--served-model-name", args.served_model_name, "--tokenizer", folder]
        command += SERVER_FLAGS.split() + args.server_args.split()
        command += ["--api-key", args.api_key] if args.api_key else []
        start = time.monotonic()
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                _wait_until_ready(process, url, log)
                report.phases({"ready": time.monotonic() - start})
                yield url
            finally:
                process.terminate()
                try:
                    process.wait(LONGEST_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: IO[str]) -> None:
    end = time.monotonic() + LONGEST_START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().strip().splitlines()[-1:] or ["nothing in its log"]
            raise JaxPagedError(f"the server ended with {process.returncode}: {last[0]}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise JaxPagedError(f"the server was not ready after {LONGEST_START_S:.0f} s")


def stand_in_tokenizer(vocab: int) -> Tokenizer:
    """A word of ASCII for every id, in the form that models with byte-level BPE use."""
    words = {
        character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    words |= {f"Ġw{i:x}": i for i in range(len(words), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
