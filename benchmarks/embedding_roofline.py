"""Tokens per second of a decoder that embeds, beside what the device's arithmetic allows.

    python -m benchmarks.embedding_roofline benchmarks/configs/qwen3-embedding-0.6b

Dummy weights, texts of random ids. `stream`: several calls wait at once, as behind a server;
`alone`: one call after another, from its ids to its vectors. Operations are those of the layers'
products and of the pairs of tokens that see each other, each counted once.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged import LLM
from jaxpaged.bench.kernel_times import kernel_times
from jaxpaged.bench.roofline import CEILINGS, matrix_params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.engine.pooling.engine import PoolingEngine
from jaxpaged.models.registry import model_config
from jaxpaged.weights.resolve import read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory with a decoder's config.json")
    parser.add_argument("--texts", type=int, default=64, help="of a call")
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--budgets", default="8192,32768", help="tokens a step, comma-separated")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", type=int, default=0, help="list this many kernels by time")
    args = parser.parse_args()
    path = Path(args.model)
    model = model_config(read_config(path), path.name)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, model.vocab, (args.texts, args.tokens)).tolist()
    for budget in map(int, args.budgets.split(",")):
        start = time.monotonic()
        settings: dict[str, Any] = {"max_num_batched_tokens": budget, "dtype": args.dtype}
        with LLM(
            args.model,
            runner="pooling",
            load_format="dummy",
            skip_tokenizer_init=True,
            compile_cache_dir="",
            warmup="lazy",
            **settings,
        ) as llm:
            engine = llm.pooling.parts.engine
            _seconds(engine, texts, 2)  # compiles
            line = {"budget": budget, "start_s": round(time.monotonic() - start, 1)}
            alone = min(_seconds(engine, texts, 1) for _ in range(args.calls))
            line |= _rates("alone", model, args, alone)
            line |= _rates("stream", model, args, _seconds(engine, texts, args.calls) / args.calls)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            if args.kernels:
                _list_kernels(engine, texts, args.kernels)


def _seconds(engine: PoolingEngine, texts: list[list[int]], calls: int) -> float:
    """Time from the first call's arrival to the last one's vectors."""
    start = time.perf_counter()
    for call in range(calls):
        engine.add(call, texts, [len(text) for text in texts])
    done = []
    while len(done) < calls:
        done += engine.step()
    seconds = time.perf_counter() - start
    lengths = np.linalg.norm(done[-1].results, axis=-1)
    if not np.allclose(lengths, 1, atol=1e-3):
        raise SystemExit(f"vectors have lengths from {lengths.min()} to {lengths.max()}, not 1")
    return seconds


def _rates(
    name: str, model: ModelConfig, args: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    tokens, pairs = args.texts * args.tokens, args.texts * args.tokens * (args.tokens + 1) / 2
    flops = 2 * matrix_params(model) * tokens
    flops += 4 * model.num_layers * model.heads * model.head_dim * pairs
    line = {
        f"{name}_ms": round(1e3 * seconds, 2),
        f"{name}_tokens_per_s": round(tokens / seconds),
        f"{name}_tflops": round(flops / seconds / 1e12, 3),
    }
    ceiling = CEILINGS.get(jax.devices()[0].device_kind)
    if ceiling is not None:
        line[f"{name}_of_roofline"] = round(flops / seconds / ceiling.flops_per_s, 3)
    return line


def _list_kernels(engine: PoolingEngine, texts: list[list[int]], most: int) -> None:
    times = kernel_times(lambda: _seconds(engine, texts, 2))
    for name, (count, micros) in list(times.items())[:most]:
        sys.stdout.write(f"  {count:6d} {micros:10.1f} us  {name[:100]}\n")


if __name__ == "__main__":
    main()
