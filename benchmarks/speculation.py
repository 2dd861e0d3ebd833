"""Tokens a second with and without guesses, by prompt lookup or a draft model, runs interleaved.

    python -m benchmarks.speculation --model SmolLM2.gguf [--runs 5] [--batches 1,128] [--json FILE]
        [--draft MODEL]

Each prompt is a list of random words, given once and begun again, which the model copies: greedy,
as many tokens as the list has. `same` says whether both gave the same tokens; on a GPU in bfloat16
a step over several tokens rounds differently from a step over one, so near ties may fall apart.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from jaxpaged import LLM, SamplingParams
from jaxpaged.bench.report import Report

TEXT = (
    "river stone garden window copper velvet thunder basket lantern meadow silver harbor pepper "
    "castle feather orange bottle winter candle forest marble button saddle rocket ladder pillow "
    "anchor bridge carpet dragon engine fabric guitar hammer island jacket kettle lemon mirror "
    "needle oyster pencil quartz ribbon spider tunnel umbrella violin walnut yellow zebra"
)
CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


def copying_prompt(llm: LLM, seed: int, num_tokens: int) -> list[int]:
    """A list of about `num_tokens` tokens, and its beginning once more."""
    words = random.Random(seed)
    text = ", ".join(words.choice(TEXT.split()) for _ in range(num_tokens))
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)[:num_tokens]
    return [*ids, *llm.get_tokenizer().encode("\n\n", add_special_tokens=False), *ids[:8]]


def timed(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.monotonic() - start, [output.outputs[0].token_ids for output in outputs]


def measure(
    engines: dict[str, LLM], batch: int, runs: int, num_tokens: int
) -> dict[str, float | bool]:
    prompts = [copying_prompt(engines["plain"], seed, num_tokens) for seed in range(batch)]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    for run in range(runs + 1):  # the first one compiles
        for name, llm in engines.items():
            spent, tokens[name] = timed(llm, prompts, num_tokens)
            if run:
                seconds[name].append(spent)
    rates = {name: batch * num_tokens / statistics.median(s) for name, s in seconds.items()}
    copied = [
        sum(a == b for a, b in zip(prompt[8:], out, strict=False)) / num_tokens
        for prompt, out in zip(prompts, tokens["plain"], strict=True)
    ]
    return {
        "tokens": num_tokens,
        "plain_tok_per_s": round(rates["plain"], 1),
        "guessing_tok_per_s": round(rates["guessing"], 1),
        "speed_up": round(rates["guessing"] / rates["plain"], 3),
        "same": tokens["plain"] == tokens["guessing"],
        "copied": round(sum(copied) / len(copied), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batches", default="1,128")
    parser.add_argument("--tokens", type=int, default=500, help="of the list")
    parser.add_argument("--draft", default="", help="a model that guesses, instead of the lookup")
    parser.add_argument("--json", type=Path, default=None, help="append the lines to this file")
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    settings = {
        "max_model_len": 3 * args.tokens + 64,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.8,
        "kv_cache_memory_bytes": (max(batches) + 1) * (3 * args.tokens + 64) * 2**16,
    }
    config = {"model": args.draft, "num_speculative_tokens": 5} if args.draft else CONFIG
    engines = {
        "plain": LLM(args.model, **settings),
        "guessing": LLM(args.model, speculative_config=config, **settings),
    }
    report = Report(sys.stdout, args.json)
    report.header(f"python -m benchmarks.speculation {' '.join(sys.argv[1:])}", opens_device=True)
    for batch in batches:
        report.add(f"batch {batch}", measure(engines, batch, args.runs, args.tokens))
    report.table()


if __name__ == "__main__":
    main()
