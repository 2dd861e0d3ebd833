"""What a step costs the host: the whole loop of the engine over a device that takes no time.

    python -m benchmarks.host_loop [--rows 256] [--steps 200] [--stream] [--workload mixed]

Plans, builds, commits and tells steps of `rows` decodes, or of a workload of `jaxpaged bench`; only
the device's part is left out. With `--stream` every token is told at once, otherwise as to callers
who wait for the end. What is printed must stay under a step's time on the GPU, or the GPU waits;
padding is its share in all tokens stepped. `--profile` tells where the time goes.
"""

import argparse
import cProfile
import pstats
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxpaged.bench.workloads import WORKLOADS, Workload, build
from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import default_ladder
from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.packing import HostBatch
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.collector import calm_collector
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.order import in_time
from jaxpaged.engine.runner import PendingStep, StepResult
from jaxpaged.metrics import EngineMetrics
from jaxpaged.text.tokenizer import Tokenizer, ids_only_tokenizer

VOCAB, MAX_LEN, PAGE_SIZE = 128_256, 4096, 16


class InstantDevice:
    """Answers every step at once with the same token."""

    num_compilations, last_compile_time = 0, 0.0

    def dispatch(self, batch: HostBatch) -> PendingStep:
        return PendingStep(batch.bucket, batch.forward)

    def copy_pages(self, plan: object) -> None:
        """There are no pages to copy."""

    def read(self, pending: PendingStep) -> StepResult:
        rows = pending.bucket.num_seqs
        none = np.empty((0, 20), np.float32)
        return StepResult(
            np.full(rows, 7, np.int32),
            np.full(rows, -1.0, np.float32),
            np.ones(rows, bool),
            none[:, 0],
            none[:, 0].astype(np.int32),
            none.astype(np.int32),
            none,
        )


def make_llm(
    rows: int, tokenizer: Tokenizer, vocab: int, *, num_pages: int | None = None, **limited: Any
) -> LLM:
    """An engine whose device takes no time; with pages for all unless told, and other limits."""
    pool = PagePool(1 + (num_pages or rows * MAX_LEN // PAGE_SIZE), PAGE_SIZE)
    ladder = default_ladder("gpu", rows, 8192)
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=MAX_LEN,
        step_sizes=ladder.step_sizes(),
        **limited,
    )
    engine = Engine(
        InstantDevice(),
        Scheduler(limits, pool, PrefixCache(pool)),
        BatchBuilder(MAX_LEN // PAGE_SIZE, PAGE_SIZE, rows, vocab, {}),
        ladder,
        tokenizer,
        EngineMetrics("host", MAX_LEN),
        max_in_flight=2,
    )
    inputs = InputProcessor(tokenizer, vocab, MAX_LEN, 0, ())
    return LLM.from_parts(SimpleNamespace(engine=engine, inputs=inputs, tokenizer=tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="instead of --steps")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    llm = make_llm(args.rows, ids_only_tokenizer(), VOCAB)
    kind = OutputKind.DELTA if args.stream else OutputKind.FINAL_ONLY
    fields = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "output_kind": kind}
    params = SamplingParams(max_tokens=1, **fields)
    own = Workload(args.rows, (128, 128), (args.steps, args.steps), 0)
    jobs = [
        (None, llm.parts.inputs.request(item.prompt, replace(params, max_tokens=item.output_len)))
        for item in build(WORKLOADS.get(args.workload, own), VOCAB)
    ]
    steps, sizes = llm.parts.engine.steps, list[int]()
    steps.on_step = lambda plan: sizes.append(plan.num_tokens)
    profile = cProfile.Profile()
    calm_collector()  # as a real engine does when it is ready
    wall, cpu = time.monotonic(), time.thread_time()
    if args.profile:
        profile.enable()
    ordered, most = in_time(jobs, llm.parts.engine.scheduler)
    for _ in llm.run(ordered, max_inflight=most):
        pass
    profile.disable()
    cpu, wall = time.thread_time() - cpu, time.monotonic() - wall
    a_step = [1e3 * seconds / len(sizes) for seconds in (cpu, wall)]
    padding = steps.num_padded_tokens / (steps.num_padded_tokens + sum(sizes))
    print(f"{args.rows} rows: {a_step[0]:.2f} ms of CPU a step, {a_step[1]:.2f} ms of wall")
    print(f"{len(sizes)} steps of {sum(sizes)} tokens, padding {padding:.1%}")
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
