"""`jaxpaged bench step`: one decode step at a number of rows and a context, without the scheduler.

Steps are dispatched back to back, so that host time hides as it does in the engine's loop.
"""

import argparse
import time
from dataclasses import replace

import jax
import numpy as np

from jaxpaged.bench.idle import measure_idle
from jaxpaged.bench.kernel_times import kernel_times
from jaxpaged.bench.report import Report
from jaxpaged.bench.roofline import CEILINGS, StepCost, floor_seconds
from jaxpaged.bench.targets import STEP_MS
from jaxpaged.config.flags import add_engine_flags, config_from_args
from jaxpaged.core.buckets import Bucket
from jaxpaged.core.packing import HostBatch, PackedLayout
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.runner import Runner
from jaxpaged.errors import ConfigError

PROFILED_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", default="1x1024,64x1024,256x1024,256x384", help="rows x context, comma-separated"
    )
    parser.add_argument("--sampler", default="greedy", choices=("greedy", "sampled", "full"))
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each case")
    parser.add_argument("--label", default="", help="names the model in the report")
    parser.add_argument(
        "--idle-steps",
        type=int,
        default=0,
        help="also trace this many decodes of the whole engine: how long the GPU waits",
    )
    parser.add_argument("--kernels", type=int, default=0, help="list this many kernels by time")
    add_engine_flags(parser)


def run(args: argparse.Namespace, report: Report) -> None:
    """Time each case; `host_ms` is what dispatching a step costs this thread."""
    config = config_from_args(args)
    config = replace(config, compile=replace(config.compile, warmup="lazy"))
    llm = LLM.from_parts(build_engine(config))
    parts = llm.parts
    report.phases(parts.phases_s)
    runner, model = parts.engine.runner, parts.model
    page_size = parts.config.cache.page_size
    pools = parts.plan.pools
    num_pages = pools.num_pages if pools.num_full_layers else pools.num_local_pages
    num_local = pools.num_local_pages if pools.has_both else 0
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    for case in args.cases.split(","):
        rows, context = (int(part) for part in case.split("x"))
        batch = decode_batch(
            Bucket("decode", args.sampler, rows, rows),
            -(-model.max_len // page_size),
            model.vocab,
            page_size=page_size,
            num_pages=num_pages,
            context=context,
            num_local_pages=num_local,
        )
        seconds, host_s = _timed(runner, batch, args.steps)
        line = {"rows": rows, "context": context, "sampler": args.sampler}
        line |= {"ms": round(1e3 * seconds, 3), "host_ms": round(1e3 * host_s, 3)}
        if ceilings is not None:
            cost = StepCost(rows, rows, rows * context, rows * context)
            itemsize = runner.state.kv_pages[0].k.dtype.itemsize
            floor = floor_seconds(model, cost, ceilings, itemsize)
            line |= {"roofline_ms": round(1e3 * floor, 3), "of_roofline": round(floor / seconds, 3)}
        target = STEP_MS.get((rows, context))
        if target is not None and args.label == "llama3-8b" and args.sampler == "greedy":
            line |= target.columns()
        if args.idle_steps:
            line |= measure_idle(llm, rows, context, args.idle_steps)
        report.add(args.label or parts.config.model.model, line)
        if args.kernels:
            report.kernels(_profiled(runner, batch), args.kernels)
    llm.close()


def _timed(runner: Runner, batch: HostBatch, steps: int) -> tuple[float, float]:
    """Seconds of a step, and seconds that this thread needs to start one."""
    for _ in range(3):
        runner.read(runner.dispatch(batch))
    start = time.monotonic()
    pending, host = [], 0.0
    for _ in range(steps):
        before = time.monotonic()
        pending.append(runner.dispatch(batch))
        host += time.monotonic() - before
    runner.read(pending[-1])
    return (time.monotonic() - start) / steps, host / steps


def _profiled(runner: Runner, batch: HostBatch) -> dict[str, tuple[int, float]]:
    return kernel_times(
        lambda: [runner.read(runner.dispatch(batch)) for _ in range(PROFILED_STEPS)]
    )


def decode_batch(
    bucket: Bucket,
    pages_per_seq: int,
    vocab: int,
    *,
    page_size: int,
    num_pages: int,
    context: int,
    num_local_pages: int = 0,
) -> HostBatch:
    """A decode step of `bucket.num_seqs` rows of equal context over shuffled pages.

    Raises:
        ConfigError: the pool or the page table is too small for it.
    """
    rows, pages = bucket.num_seqs, -(-context // page_size)
    if rows * pages >= num_pages or pages > pages_per_seq:
        raise ConfigError(
            f"{rows} rows of {context} tokens need {rows * pages} pages, the pool has "
            f"{num_pages - 1} and a row at most {pages_per_seq}: choose a smaller case"
        )
    batch, views = PackedLayout(bucket, pages_per_seq, vocab, num_local_pages > 0).new_batch()
    random = np.random.RandomState(0)
    table = 1 + random.permutation(num_pages - 1)[: rows * pages].reshape(rows, pages)
    views["token_ids"][:] = random.randint(0, vocab, rows)
    views["positions"][:] = context - 1
    views["page_table"][:, :pages] = table
    views["slot_mapping"][:] = table[:, -1] * page_size + (context - 1) % page_size
    if num_local_pages:  # any will do: what is read costs the same
        local = 1 + table % (num_local_pages - 1)
        views["local_page_table"][:, :pages] = local
        views["local_slot_mapping"][:] = local[:, -1] * page_size + (context - 1) % page_size
    views["kv_lens"][:] = context
    views["cu_q_lens"][:] = np.arange(rows + 1)
    for name in ("seq_slots", "sample_slots", "logit_rows"):
        views[name][:] = np.arange(rows)
    if bucket.sampler != "greedy":
        views["temperature"][:] = random.uniform(0.5, 1.2, rows)
        views["top_k"][:] = random.choice([0, 20, 50], rows)
        views["top_p"][:] = random.choice([0.8, 0.95, 1.0], rows)
        views["min_p"][:] = random.choice([0.0, 0.05], rows)
    if bucket.sampler == "full":
        views["repetition_penalty"][:] = 1.1
    return batch
