"""`jaxpaged bench throughput`: the peer's workloads, offline, greedy, ids in and ids out."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpaged.bench.kernel_times import StepWindow, sums_by_name
from jaxpaged.bench.report import Report
from jaxpaged.bench.roofline import CEILINGS, StepCost, floor_seconds, step_cost
from jaxpaged.bench.targets import WORKLOAD_UNITS, Target, workload_target
from jaxpaged.bench.workloads import WORKLOADS, WorkItem, build, digest
from jaxpaged.config.flags import add_engine_flags, config_from_args
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.order import Job, in_time
from jaxpaged.errors import ConfigError, InvariantError

LATENCY_RUNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, comma-separated")
    parser.add_argument("--runs", type=int, default=2, help="runs of each; latency takes five")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="after so long in this process each workload runs once only",
    )
    parser.add_argument("--label", default="", help="names the model in the report")
    parser.add_argument(
        "--kernels", type=int, default=0, help="list this many kernels by time, of one more run"
    )
    parser.add_argument(
        "--traced-steps", default="200:260", help="steps of that run, FIRST:END counted from 0"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure each workload; `seconds` is the best run (latency: the median)."""
    begin = time.monotonic()
    names, traced = workload_names(args.workloads), _steps(args.traced_steps)
    llm = LLM.from_parts(build_engine(config_from_args(args), warm=True, show_progress=True))
    report.phases(llm.parts.phases_s)
    label = args.label or args.__dict__.get("model.model", "")
    for name in names:
        items = build(WORKLOADS[name], llm.model_config.vocab)
        run_once(llm, items[:8])
        before = llm.parts.engine.runner.num_compilations
        runs: list[Run] = []
        wanted = LATENCY_RUNS if name == "latency" else args.runs
        while len(runs) < wanted and (not runs or time.monotonic() - begin < args.seconds):
            runs.append(run_once(llm, items))
        line = _line(name, items, runs)
        best = min(runs, key=lambda one: one.seconds)
        line |= _padding(best) | of_roofline(llm, best)
        line["compilations"] = llm.parts.engine.runner.num_compilations - before
        target = workload_target(label, name)
        if target is not None:
            line |= target.columns() | {"of_peer": _of_peer(line[WORKLOAD_UNITS[name][1]], target)}
        report.add(label, line)
        if args.kernels:
            window = StepWindow(*traced)
            run_once(llm, items, window)
            report.add(label, {"workload": name, "traced": args.traced_steps} | window.means())
            report.kernels(sums_by_name(window.runs), args.kernels)
    llm.close()


def workload_names(text: str) -> list[str]:
    """The workloads named, comma-separated.

    Raises:
        ConfigError: one that there is not.
    """
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workloads: {name!r} is none of {', '.join(WORKLOADS)}")
    return names


def _steps(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--traced-steps: {text!r}, allowed: FIRST:END, such as 200:260")
    return int(first), int(end)


def _of_peer(value: float, target: Target) -> float:
    """How many times as fast as the peer."""
    assert target.peer is not None
    return round(target.peer / value if target.unit == "ms" else value / target.peer, 3)


@dataclass(frozen=True)
class Run:
    """One go through a workload."""

    seconds: float
    first_token_s: float  # of the request that was done last
    costs: list[StepCost]  # of every step
    padded_tokens: int


def run_once(
    llm: LLM, items: list[WorkItem], watch: Callable[[StepPlan], None] | None = None
) -> Run:
    """All requests at once, as `LLM.generate` hands them over, ids in and ids out.

    `watch` is told of every step that starts.

    Raises:
        InvariantError: an answer that is not as long as asked.
    """
    engine, inputs = llm.parts.engine, llm.parts.inputs
    jobs: list[Job] = []
    lengths: dict[str, int] = {}
    for item in items:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=item.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,  # as `LLM.generate` asks
        )
        request = inputs.request(item.prompt, params)
        jobs.append((None, request))
        lengths[request.request_id] = item.output_len
    llm.reset_prefix_cache()
    steps: list[tuple[list[int], list[int]]] = []  # plans themselves would burden the collector

    def note(plan: StepPlan) -> None:
        steps.append((plan.columns.starts, plan.columns.q_lens))
        if watch is not None:
            watch(plan)

    engine.steps.on_step = note
    padded, first, start = engine.steps.num_padded_tokens, 0.0, time.monotonic()
    ordered, most = in_time(jobs, engine.scheduler)
    for output in llm.run(ordered, max_inflight=most):
        made, asked = len(output.outputs[0].token_ids), lengths[output.request_id]
        if made != asked:
            raise InvariantError(f"{output.request_id}: {made} tokens, asked were {asked}")
        if output.metrics is not None and output.metrics.first_token_time is not None:
            first = output.metrics.first_token_time - start
    seconds = time.monotonic() - start
    engine.steps.on_step = None
    costs = [step_cost(*step) for step in steps]  # not while the clock runs
    return Run(seconds, first, costs, engine.steps.num_padded_tokens - padded)


def _line(name: str, items: list[WorkItem], runs: list[Run]) -> dict[str, Any]:
    prompt_tokens = sum(len(item.prompt) for item in items)
    output_tokens = sum(item.output_len for item in items)
    all_s = [run.seconds for run in runs]
    seconds = statistics.median_low(all_s) if name == "latency" else min(all_s)
    line = {
        "workload": name,
        "n": len(items),
        "digest": digest(items),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 4),
        "all_s": [round(s, 4) for s in all_s],
        "output_tok_per_s": round(output_tokens / seconds, 1),
        "prompt_tok_per_s": round(prompt_tokens / seconds, 1),
    }
    if name == "latency":
        first = next(run.first_token_s for run in runs if run.seconds == seconds)
        line["ms_first_token"] = round(1e3 * first, 3)
        line["ms_per_token_after_first"] = round(1e3 * (seconds - first) / (output_tokens - 1), 4)
    return line


def _padding(run: Run) -> dict[str, Any]:
    real = sum(cost.num_tokens for cost in run.costs)
    share = run.padded_tokens / (real + run.padded_tokens)
    return {"steps": len(run.costs), "step_tokens": real, "padded_share": round(share, 4)}


def of_roofline(llm: LLM, run: Run) -> dict[str, Any]:
    """The least time for a run's steps, and its share of the run; nothing on unknown devices."""
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    if ceilings is None:
        return {}
    itemsize = llm.parts.engine.runner.state.kv_pages[0].k.dtype.itemsize
    floor = sum(floor_seconds(llm.model_config, cost, ceilings, itemsize) for cost in run.costs)
    return {"roofline_s": round(floor, 4), "of_roofline": round(floor / run.seconds, 3)}
