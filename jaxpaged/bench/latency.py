"""`jaxpaged bench latency`: one batch of equal requests, over and over; flags as in vLLM."""

import argparse
from typing import Any

import numpy as np

from jaxpaged.bench.report import Report
from jaxpaged.bench.throughput import of_roofline, run_once
from jaxpaged.bench.workloads import Workload, build
from jaxpaged.config.flags import add_engine_flags, config_from_args
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=128, help="sampled tokens")
    parser.add_argument("--batch-size", type=int, default=8, help="requests at once")
    parser.add_argument("--num-iters-warmup", type=int, default=3, help="untimed batches first")
    parser.add_argument("--num-iters", type=int, default=10, help="timed batches")
    parser.add_argument("--label", default="", help="names the model in the report")
    add_engine_flags(parser)


def run(args: argparse.Namespace, report: Report) -> None:
    """Time whole batches, from the first request's arrival to the last token."""
    llm = LLM.from_parts(build_engine(config_from_args(args), warm=True, show_progress=True))
    report.phases(llm.parts.phases_s)
    lengths = (args.input_len,) * 2, (args.output_len,) * 2
    items = build(Workload(args.batch_size, *lengths, seed=303), llm.model_config.vocab)
    for _ in range(args.num_iters_warmup):
        run_once(llm, items)
    runs = [run_once(llm, items) for _ in range(max(args.num_iters, 1))]
    seconds = [one.seconds for one in runs]
    line: dict[str, Any] = {"batch_size": args.batch_size, "input_len": args.input_len}
    line |= {"output_len": args.output_len, "avg_ms": round(1e3 * float(np.mean(seconds)), 3)}
    for percentile in PERCENTILES:
        line[f"p{percentile}_ms"] = round(1e3 * float(np.percentile(seconds, percentile)), 3)
    line |= of_roofline(llm, min(runs, key=lambda one: one.seconds))
    report.add(args.label or llm.parts.config.model.model, line)
    llm.close()
