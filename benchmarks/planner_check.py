"""Predicted against measured memory: six configurations, a process each, under full load.

    python -m benchmarks.planner_check [--json FILE] [--only NAME,..] [--warm] [--default-pool]

Each starts with dummy weights and a pool fixed by num_gpu_blocks_override (`--default-pool`: the
planner's own), compiles its programs, runs more requests than run at once through every sampler,
and compares weights, slots and workspace as planned with `peak_bytes_in_use` less the pool. What
XLA takes to try products out comes before the pool, so it is no part of that peak; `--warm` starts
a second time from the programs kept on disk. Exit code 1 where a case is off by over 5 % and by
over 200 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ALLOWED_SHARE, ALLOWED_BYTES = 0.05, 200e6
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Case:
    """A model's shape and the sizes that memory depends on."""

    name: str
    model: str
    max_num_batched_tokens: int
    max_num_seqs: int
    num_gpu_blocks_override: int
    max_model_len: int = 4096


CASES = (
    Case("llama3-8b", "llama3-8b", 8192, 256, 20_000),
    Case("llama3-8b-small-steps", "llama3-8b", 2048, 64, 20_000, 8192),
    Case("qwen2.5-7b-large-steps", "qwen2.5-7b", 16_384, 512, 40_000),
    Case("qwen2.5-0.5b", "qwen2.5-0.5b", 8192, 256, 100_000),
    Case("qwen2.5-0.5b-small-steps", "qwen2.5-0.5b", 1024, 32, 50_000, 32_768),
    Case("llama2-13b", "llama2-13b", 4096, 128, 4_000),
)


def run_case(case: Case, cache: str, *, default_pool: bool) -> dict[str, object]:
    """Start, load fully, measure; in a process of its own, because a peak is never reset."""
    import jax
    import numpy as np

    from jaxpaged.config.flags import config_from_keywords
    from jaxpaged.core.params import SamplingParams
    from jaxpaged.engine.factory import build_engine
    from jaxpaged.engine.llm import LLM

    settings = asdict(case) | {"model": str(CONFIGS / case.model)}
    del settings["name"]
    if default_pool:
        del settings["num_gpu_blocks_override"]
    config = config_from_keywords(
        **settings,
        load_format="dummy",
        skip_tokenizer_init=True,
        compile_cache_dir=cache,
        warmup="all",
        batch_buckets=[case.max_num_seqs],
        token_buckets=[min(2048, case.max_num_batched_tokens)],
        enable_prefix_caching=False,
    )
    llm = LLM.from_parts(build_engine(config, warm=True))
    plan, runner = llm.parts.plan, llm.parts.engine.runner
    started = _stats(jax.devices()[0])
    random = np.random.default_rng(0)
    prompts, params = [], []
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]
    kinds += [{"presence_penalty": 0.5, "logprobs": 5}, {"prompt_logprobs": 2}]
    for i in range(2 * case.max_num_seqs):
        length = random.integers(64, min(1024, case.max_model_len - 40))
        prompts.append(random.integers(0, llm.model_config.vocab, length).tolist())
        kind = kinds[i % 3] if i % 64 else kinds[3]
        params.append(SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False, **kind))
    llm.generate(prompts, params, use_tqdm=False)
    loaded = _stats(jax.devices()[0])
    pool = plan.num_pages * plan.page
    predicted = plan.weights + plan.slots + plan.workspace
    measured = loaded["peak"] - pool
    return {
        "case": case.name,
        "device": jax.devices()[0].device_kind,
        "compiled": runner.num_compilations,
        "loaded": runner.num_loaded,
        "preemptions": llm.parts.engine.scheduler.num_preemptions,
        "pool_mb": _mb(pool),
        "weights_mb": _mb(plan.weights),
        "slots_mb": _mb(plan.slots),
        "workspace_mb": _mb(plan.workspace),
        "largest_program_mb": _mb(max(runner.temp_bytes().values(), default=0)),
        "in_use_less_pool_mb": _mb(started["in_use"] - pool),
        "peak_at_ready_less_pool_mb": _mb(started["peak"] - pool),
        "predicted_mb": _mb(predicted),
        "measured_mb": _mb(measured),
        "off_mb": _mb(predicted - measured),
        "off_percent": round(100 * (predicted - measured) / max(measured, 1), 2),
        "holds": abs(predicted - measured) <= max(ALLOWED_BYTES, ALLOWED_SHARE * measured),
    }


def _stats(device) -> dict[str, int]:
    found = device.memory_stats() or {}
    return {"in_use": found.get("bytes_in_use", 0), "peak": found.get("peak_bytes_in_use", 0)}


def _mb(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 1)


def _in_a_process(case: Case, cache: str, *, default_pool: bool) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.planner_check",
        "--child",
        json.dumps(asdict(case)),
    ]
    command += ["--cache", cache, *(["--default-pool"] if default_pool else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"case": case.name, "error": said, "holds": False}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _table(lines: list[dict[str, object]]) -> None:
    columns = ["case", "start", "predicted_mb", "measured_mb", "off_mb", "off_percent", "holds"]
    print("  ".join(f"{column:>24}" for column in columns))
    for line in lines:
        print("  ".join(f"{line.get(column, '-')!s:>24}" for column in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, default=None, help="append the lines to this file")
    parser.add_argument("--only", default="", help="names of cases, comma-separated")
    parser.add_argument("--warm", action="store_true", help="a second start, from kept programs")
    parser.add_argument("--default-pool", action="store_true", help="the planner sizes the pool")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case = Case(**json.loads(args.child))
        print(json.dumps(run_case(case, args.cache, default_pool=args.default_pool)))
        return 0
    wanted = set(filter(None, args.only.split(",")))
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if wanted and case.name not in wanted:
                continue
            for start in ("cold", "warm") if args.warm else ("cold",):
                cache = f"{folder}/{case.name}"
                line = {"start": start} | _in_a_process(case, cache, default_pool=args.default_pool)
                lines.append(line)
                print(json.dumps(line), flush=True)
                if args.json is not None:
                    with args.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    _table(lines)
    return 0 if all(line["holds"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
