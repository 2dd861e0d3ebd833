"""Tokens a second with and without guesses, by prompt lookup or a draft model, runs interleaved.

    python -m benchmarks.speculation --model SmolLM2.gguf [--runs 5] [--batches 1,128] [--json FILE]
        [--draft MODEL]

Each prompt is a list of numbers, given twice and begun once more, which the model copies: greedy,
as many tokens as the list has. (SmolLM2 loses its place in lists of words.) `--guesses` are those
that are recommended; fewer are guessed where they are not right. Each engine has a process of its
own, as it has in use, and one at a time works. A second engine without guesses, `again`, starts
last: what differs between it and the first one is not due to guesses. It finds its programs on
disk, as the one with guesses does, where the first may have compiled them.

`same` says whether both gave the same tokens; on a GPU in bfloat16 a step over several tokens
rounds differently from a step over one, so near ties may fall apart. `copied` is the share of
tokens as in the list. A line a run tells how many programs of each kind were started, how long the
host took to start one and then waited for it, in ms (medians).
"""

import argparse
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxpaged import LLM, SamplingParams
from jaxpaged.bench.report import Report

NUM_BEGUN = 8  # tokens of the list that the prompt gives once more


def copying_prompt(llm: LLM, seed: int, num_tokens: int) -> list[int]:
    """A list of `num_tokens` tokens, twice, and its beginning once more."""
    numbers, encode = random.Random(seed), llm.get_tokenizer().encode
    text = ", ".join(str(numbers.randrange(100, 1000)) for _ in range(num_tokens))
    ids = encode(text, add_special_tokens=False)[:num_tokens]
    ids += encode("\n\n", add_special_tokens=False)
    return [*ids, *ids, *ids[:NUM_BEGUN]]


class Watched:
    """A runner that notes how long its callers are in it."""

    def __init__(self, runner: Any):
        self._runner = runner
        self.starts: dict[str, list[float]] = defaultdict(list)
        self.waits: dict[str, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, batch: Any) -> Any:
        return self._timed(self.starts[batch.bucket.kind], self._runner.dispatch, batch)

    def dispatch_chain(self, batches: Any) -> Any:
        return self._timed(self.starts["chain"], self._runner.dispatch_chain, batches)

    def read(self, pending: Any) -> Any:
        if pending.place:
            return self._runner.read(pending)
        kind = pending.bucket.kind if pending.place is None else "chain"
        return self._timed(self.waits[kind], self._runner.read, pending)

    def told(self) -> dict[str, str]:
        """By kind: how many programs, ms to start one and to wait for it; begins anew."""
        found = {
            kind: f"{len(starts)} x {_ms(starts)} + {_ms(self.waits[kind])}"
            for kind, starts in sorted(self.starts.items())
        }
        self.starts.clear()
        self.waits.clear()
        return found

    def _timed(self, kept: list[float], call: Any, argument: Any) -> Any:
        start = time.perf_counter()
        result = call(argument)
        kept.append(time.perf_counter() - start)
        return result


def _ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds or [0.0]), 2)


def serve(pipe: Connection, model: str, settings: dict[str, Any], num_tokens: int) -> None:
    """An engine that runs batches as it is told, until it is told 0."""
    llm = LLM(model, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    steps: Any = llm.parts.engine.steps
    runner = steps.runner
    steps.runner = watched = Watched(runner)
    pipe.send("ready")
    while batch := pipe.recv():
        prompts = [copying_prompt(llm, seed, num_tokens) for seed in range(batch)]
        llm.reset_prefix_cache()
        start, cpu = time.monotonic(), time.thread_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu = time.monotonic() - start, time.thread_time() - cpu
        told = watched.told() | {
            "cpu_s": round(cpu, 3),
            "loaded": runner.num_loaded,
            "compiled": runner.num_compilations,
        }
        pipe.send((seconds, [output.outputs[0].token_ids for output in outputs], prompts, told))
    llm.close()


def measure(
    engines: dict[str, Connection], batch: int, runs: int, report: Report
) -> dict[str, float | bool]:
    """Median tokens a second of each engine over `runs` interleaved runs."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    prompts: list[list[int]] = []
    for run in range(-1, runs + 1):  # the first two compile
        for name, pipe in engines.items():
            pipe.send(batch)
            spent, tokens[name], prompts, told = pipe.recv()
            if run > 0:
                seconds[name].append(spent)
                line = {"run": run, "batch": batch, "engine": name, "seconds": round(spent, 4)}
                report.take(line | told)
    num_tokens = len(tokens["plain"][0])
    rates = {name: batch * num_tokens / statistics.median(s) for name, s in seconds.items()}
    pairs = [
        zip(p[NUM_BEGUN:], t, strict=False) for p, t in zip(prompts, tokens["plain"], strict=True)
    ]
    copied = sum([a == b for pair in pairs for a, b in pair])
    found: dict[str, float | bool] = {"tokens": num_tokens}
    found |= {f"{name}_tok_per_s": round(rate, 1) for name, rate in rates.items()}
    found["speed_up"] = round(rates["guessing"] / rates["plain"], 3)
    found["over_again"] = round(rates["guessing"] / rates["again"], 3)
    found["same"] = tokens["plain"] == tokens["guessing"]
    return found | {"copied": round(copied / (batch * num_tokens), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", default="1,128")
    parser.add_argument("--tokens", type=int, default=500, help="of the list")
    parser.add_argument("--guesses", type=int, default=15, help="num_speculative_tokens")
    parser.add_argument("--draft", default="", help="a model that guesses, instead of the lookup")
    parser.add_argument("--json", type=Path, default=None, help="append the lines to this file")
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    max_len = 3 * args.tokens + 64
    settings = {
        "max_model_len": max_len,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.28,  # of each of three processes
        "kv_cache_memory_bytes": (max(batches) + 1) * max_len * 2**16,
    }
    how = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if args.draft:
        how = {"model": args.draft}
    how = {"speculative_config": how | {"num_speculative_tokens": args.guesses}}
    kinds = {"plain": settings, "guessing": settings | how, "again": settings}
    report = Report(sys.stdout, args.json)
    report.header(f"python -m benchmarks.speculation {' '.join(sys.argv[1:])}", opens_device=False)
    spawn, engines = multiprocessing.get_context("spawn"), dict[str, Connection]()
    processes: list[Any] = []
    for name, fields in kinds.items():
        engines[name], theirs = spawn.Pipe()
        given = theirs, args.model, fields, args.tokens
        processes.append(spawn.Process(target=serve, args=given, daemon=True))
        processes[-1].start()
        theirs.close()  # a process that dies ends this one
        engines[name].recv()  # ready, before the next one starts
    for batch in batches:
        report.add(f"batch {batch}", measure(engines, batch, args.runs, report))
    for pipe in engines.values():
        pipe.send(0)
    for process in processes:
        process.join()
    report.table()


if __name__ == "__main__":
    main()
