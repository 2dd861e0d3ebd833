"""Pages on a device: how full the pool is kept, and what a shared prefix saves.

    python -m benchmarks.device_pages use [--model FOLDER] [--requests 1500] [--pages 20000]
    python -m benchmarks.device_pages shared [--model FOLDER] [--requests 64] [--prefix 4096]

Dummy weights. `use` is `benchmarks.schedule_simulation pages` with the whole engine: requests of 32
to 1,024 prompt tokens and 32 to 512 output tokens, all queued at once; for the steps in which some
wait it tells tokens stored / tokens of the pages held by sequences, and pages held / pool. `shared`
sends requests that have a prefix in common, all at once, and tells the time to the first token with
the cache off, cold and warm, and how many prompt tokens were computed. Exit code 1 where a figure
misses: 0.96 and 0.90; warm 10 times sooner than off, cold at most the prefix and each one's tail
and a page.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.schedule_simulation import OUTPUT_LENS, PROMPT_LENS, FullnessWatch
from jaxpaged import LLM, SamplingParams
from jaxpaged.bench.report import Report
from jaxpaged.config.flags import config_from_keywords
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.request import Request
from jaxpaged.engine.factory import build_engine

CONFIGS = Path(__file__).parent / "configs"
LEAST_STORED, LEAST_HELD, LEAST_GAIN = 0.96, 0.90, 10
SHARED_OUTPUT = 4  # tokens


def make_llm(model: str, **settings: Any) -> LLM:
    config = config_from_keywords(
        model=model, load_format="dummy", skip_tokenizer_init=True, warmup="all", **settings
    )
    return LLM.from_parts(build_engine(config, warm=True))


def make_request(llm: LLM, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    return llm.parts.inputs.request(prompt, params)


def measure_use(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line: how full the pool was."""
    llm = make_llm(
        args.model,
        num_gpu_blocks_override=args.pages,
        block_size=16,
        max_model_len=2048,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        batch_buckets=[args.max_num_seqs // 2, args.max_num_seqs],
        token_buckets=[args.max_num_batched_tokens // 4, args.max_num_batched_tokens],
    )
    rng = np.random.default_rng(0)
    jobs: list[tuple[str | None, Request]] = []
    for _ in range(args.requests):
        prompt = rng.integers(0, llm.model_config.vocab, rng.integers(*PROMPT_LENS, endpoint=True))
        length = int(rng.integers(*OUTPUT_LENS, endpoint=True))
        jobs.append((None, make_request(llm, prompt.tolist(), length)))
    watch = FullnessWatch(llm.parts.engine.scheduler)
    llm.parts.engine.steps.on_step = lambda _: watch.look()
    start, num_done = time.monotonic(), 0
    for _ in llm.run(jobs, max_inflight=len(jobs)):
        num_done += 1
        if time.monotonic() - start > args.seconds:
            break  # what still runs is aborted
    spent, found = time.monotonic() - start, watch.found()
    yield {
        "label": "use",
        "requests": num_done,
        "seconds": round(spent, 1),
        **{name: round(value, 4) for name, value in asdict(found).items()},
        "holds": found.stored > LEAST_STORED and found.held > LEAST_HELD,
    }


@dataclass
class _Round:
    """Requests that came at once: seconds to each one's first token, prompt tokens computed."""

    first_s: list[float]
    num_computed: int


def run_round(llm: LLM, prompts: list[list[int]]) -> _Round:
    engine, found = llm.parts.engine, _Round([], 0)

    def count(plan: StepPlan) -> None:
        rows = plan.columns
        for seq, start, q_len in zip(rows.seqs, rows.starts, rows.q_lens, strict=True):
            found.num_computed += max(min(start + q_len, seq.num_prompt_tokens) - start, 0)

    requests = [make_request(llm, prompt, SHARED_OUTPUT) for prompt in prompts]
    begun: set[str] = set()
    engine.steps.on_step = count
    start = time.monotonic()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if event.token_ids and event.request_id not in begun:
                begun.add(event.request_id)
                found.first_s.append(time.monotonic() - start)
    engine.steps.on_step = None
    return found


def measure_shared(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each of: cache off, cold, warm."""
    longest = args.prefix + args.tail + SHARED_OUTPUT
    settings = {
        "num_gpu_blocks_override": args.requests * (-(-longest // 16) + 1) + 1,
        "block_size": 16,
        "max_model_len": longest,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "batch_buckets": [args.requests],
        "token_buckets": [args.max_num_batched_tokens // 4, args.max_num_batched_tokens],
    }
    lines: dict[str, dict[str, Any]] = {}
    for mode in ("off", "on"):
        llm = make_llm(args.model, enable_prefix_caching=mode == "on", **settings)
        rng, vocab = np.random.default_rng(0), llm.model_config.vocab
        prefix = rng.integers(0, vocab, args.prefix).tolist()
        run_round(llm, [rng.integers(0, vocab, args.prefix).tolist()])  # what happens once only
        llm.reset_prefix_cache()
        for state in ("off",) if mode == "off" else ("cold", "warm"):
            rounds = []
            for _ in range(args.runs):
                if state == "cold":
                    llm.reset_prefix_cache()
                tails = rng.integers(0, vocab, (args.requests, args.tail)).tolist()
                rounds.append(run_round(llm, [prefix + tail for tail in tails]))
            lines[state] = _shared_line(state, rounds)
        llm.close()
    most = args.prefix + args.requests * (args.tail + 16)
    gain = lines["off"]["p50_first_ms"] / lines["warm"]["p50_first_ms"]
    lines["off"] |= {"gain": 1.0, "most_computed": "-", "holds": True}
    computed = lines["cold"]["computed"]
    cold_gain = lines["off"]["p50_first_ms"] / lines["cold"]["p50_first_ms"]
    lines["cold"] |= {"gain": round(cold_gain, 1), "most_computed": most, "holds": computed <= most}
    lines["warm"] |= {"gain": round(gain, 1), "most_computed": "-", "holds": gain >= LEAST_GAIN}
    yield from lines.values()


def _shared_line(state: str, rounds: list[_Round]) -> dict[str, Any]:
    medians = [1e3 * statistics.median(one.first_s) for one in rounds]
    return {
        "label": state,
        "runs": len(rounds),
        "p50_first_ms": round(statistics.median(medians), 2),
        "last_first_ms": round(1e3 * statistics.median([max(one.first_s) for one in rounds]), 2),
        "computed": max(one.num_computed for one in rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("use", "shared"))
    parser.add_argument("--model", default=str(CONFIGS / "llama3-8b"))
    parser.add_argument("--requests", type=int, default=None, help="1500 of use, 64 of shared")
    parser.add_argument("--pages", type=int, default=20_000, help="of use")
    parser.add_argument("--max-num-seqs", type=int, default=1024, help="of use")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=45, help="after which use stops")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens that all share")
    parser.add_argument("--tail", type=int, default=64, help="tokens of each one's own")
    parser.add_argument("--runs", type=int, default=3, help="of shared, each state")
    parser.add_argument("--json", type=Path, default=None, help="append the lines to this file")
    args = parser.parse_args()
    args.requests = args.requests or (1500 if args.what == "use" else 64)
    report, holds = Report(sys.stdout, args.json), True
    report.header(f"python -m benchmarks.device_pages {' '.join(sys.argv[1:])}", opens_device=True)
    for line in (measure_use if args.what == "use" else measure_shared)(args):
        report.take(line)
        holds = holds and line["holds"]
    report.table()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
