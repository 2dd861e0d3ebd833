"""`jaxpaged bench kernels`: every kernel checked against float32 references, then timed.

Attention is timed inside one program that repeats it over KV larger than the L2 cache, the small
ops likewise by the profiler, the sampler in a loop over logits larger than the cache.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import jax

from jaxpaged.bench import (
    attention_check,
    attention_times,
    one_row_op,
    product_op,
    sampler_ops,
    small_ops,
)
from jaxpaged.bench.report import Report
from jaxpaged.bench.roofline import CEILINGS
from jaxpaged.errors import ConfigError, JaxPagedError
from pallas_kernels import tuning

ATTENTION = {f"attention-{kernel}": kernel for kernel in attention_check.KERNELS}
OPS = (*ATTENTION, *small_ops.OPS, *product_op.OPS, *one_row_op.OPS, "sampler")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default=",".join(OPS), help="names, comma-separated")
    parser.add_argument(
        "--check", type=int, default=15, help="random cases a shape; 15 are over 200 a kernel"
    )
    parser.add_argument("--no-time", action="store_true", help="check only")
    parser.add_argument("--pages", default="16", help="page sizes timed, comma-separated")
    parser.add_argument("--only", default="", help="time attention cases whose name begins so")


def run(args: argparse.Namespace, report: Report) -> None:
    """Check all ops, then time all.

    Raises:
        ConfigError: an op that there is not, or a device without these kernels.
        JaxPagedError: at the end, if any case was wrong.
    """
    ops = args.ops.split(",")
    for op in ops:
        if op not in OPS:
            raise ConfigError(f"--ops: {op!r} is none of {', '.join(OPS)}")
    if ops != ["sampler"] and not tuning.hopper_available():
        raise ConfigError(
            f"the kernels run on Hopper GPUs, here is {jax.devices()[0].device_kind}: "
            "only --ops sampler can be measured"
        )
    failed = 0
    for op in ops if args.check else ():
        for line in check(op, args.check):
            report.add("check", line)
            failed += not line["passed"]
    for op in () if args.no_time else ops:
        _time(op, args, report)
    if failed:
        raise JaxPagedError(f"{failed} shapes have wrong cases, see the lines with passed: false")


def check(op: str, cases: int) -> Iterable[dict[str, Any]]:
    """One line a shape: how many cases, the worst, whether all passed."""
    if op in ATTENTION:
        return attention_check.check(ATTENTION[op], cases)
    if op == "sampler":
        return [line for shape in sampler_ops.CHECKED for line in sampler_ops.check(*shape)]
    return _module_of(op).check(op, cases)


def _module_of(op: str) -> Any:
    return next(module for module in (product_op, one_row_op, small_ops) if op in module.OPS)


def _time(op: str, args: argparse.Namespace, report: Report) -> None:
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    if op == "sampler":
        for line in sampler_ops.time_ops(ceilings):
            report.add("sampler", line)
    elif op not in ATTENTION:
        module = _module_of(op)
        for line in module.time_op(op, ceilings):
            report.add("small op" if module is small_ops else "product", line)
    else:
        for name, case in attention_times.TIMED.items():
            fits = op != "attention-decode" or max(case.q_lens) == 1
            for page in args.pages.split(",") if fits and name.startswith(args.only) else ():
                report.add(
                    name, attention_times.time_case(name, ATTENTION[op], int(page), ceilings)
                )
