"""`jaxpaged bench throughput`: the peer's workloads, offline, greedy, ids in and ids out."""

import argparse
import statistics
import time
from typing import Any

import jax

from jaxpaged.bench.report import Report
from jaxpaged.bench.roofline import CEILINGS, StepCost, floor_seconds, step_cost
from jaxpaged.bench.workloads import WORKLOADS, WorkItem, build, digest
from jaxpaged.config.flags import add_engine_flags, config_from_args
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Request
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, comma-separated")
    parser.add_argument("--runs", type=int, default=2, help="runs of each; latency takes five")
    parser.add_argument("--label", default="", help="names the model in the report")
    add_engine_flags(parser)


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure each workload; `seconds` is the best run (latency: the median)."""
    llm = LLM.from_parts(build_engine(config_from_args(args), warm=True, show_progress=True))
    engine, model = llm.parts.engine, llm.model_config
    report.phases(llm.parts.phases_s)
    for name in args.workloads.split(","):
        items = build(WORKLOADS[name], model.vocab)
        _once(llm, items[:8])
        before = engine.runner.num_compilations
        costs: list[StepCost] = []
        engine.on_step = lambda plan, costs=costs: costs.append(step_cost(plan))
        runs = []
        for _ in range(5 if name == "latency" else args.runs):
            costs.clear()
            runs.append(_once(llm, items))
        engine.on_step = None
        best = min(runs, key=lambda r: r[0])
        seconds = statistics.median(r[0] for r in runs) if name == "latency" else best[0]
        line = _line(name, items, seconds, [r[0] for r in runs], best[1])
        line |= _compared(llm, costs, best[0], engine.runner.num_compilations - before)
        report.add(args.label or args.__dict__.get("model.model", ""), line)
    llm.close()


def _once(llm: LLM, items: list[WorkItem]) -> tuple[float, float]:
    """Seconds for all requests, and seconds to the first token of the first."""
    inputs = llm.parts.inputs
    jobs: list[tuple[str | None, Request]] = []
    for item in items:
        params = SamplingParams(
            temperature=0.0, max_tokens=item.output_len, ignore_eos=True, detokenize=False
        )
        jobs.append((None, inputs.request(item.prompt, params)))
    llm.reset_prefix_cache()
    start = time.monotonic()
    first = 0.0
    for output in llm.run(jobs, max_inflight=len(jobs)):
        made = sum(len(answer.token_ids) for answer in output.outputs)
        wanted = items[[job[1].request_id for job in jobs].index(output.request_id)].output_len
        if made != wanted:
            raise RuntimeError(f"{output.request_id}: {made} tokens, asked were {wanted}")
        if output.metrics is not None and output.metrics.first_token_time is not None:
            first = output.metrics.first_token_time - start
    return time.monotonic() - start, first


def _line(
    name: str, items: list[WorkItem], seconds: float, runs: list[float], first_token_s: float
) -> dict[str, Any]:
    prompt_tokens = sum(len(item.prompt) for item in items)
    output_tokens = sum(item.output_len for item in items)
    line = {
        "workload": name,
        "n": len(items),
        "digest": digest(items),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 4),
        "all_s": [round(s, 4) for s in runs],
        "output_tok_per_s": round(output_tokens / seconds, 1),
        "prompt_tok_per_s": round(prompt_tokens / seconds, 1),
    }
    if name == "latency":
        line["ms_first_token"] = round(1e3 * first_token_s, 3)
        after = (seconds - first_token_s) / (output_tokens - 1)
        line["ms_per_token_after_first"] = round(1e3 * after, 4)
    return line


def _compared(
    llm: LLM, costs: list[StepCost], seconds: float, num_compilations: int
) -> dict[str, Any]:
    """The run beside its floor, and what must stay zero."""
    compared: dict[str, Any] = {"steps": len(costs), "compilations": num_compilations}
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    if ceilings is not None:
        itemsize = llm.parts.engine.runner.state.kv_pages[0].k.dtype.itemsize
        floor = sum(floor_seconds(llm.model_config, cost, ceilings, itemsize) for cost in costs)
        compared |= {"roofline_s": round(floor, 4), "of_roofline": round(floor / seconds, 3)}
    padded = llm.parts.engine.num_padded_tokens
    real = sum(cost.num_tokens for cost in costs)
    return compared | {"step_tokens": real, "padded_tokens_since_start": padded}
