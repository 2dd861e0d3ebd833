"""`jaxpaged plan MODEL`: what fits on a device, before any weight is read.

Exit codes: 0 it fits, 1 it does not, 2 the model or a setting cannot work.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxpaged.config.flags import (
    ArgumentParser,
    add_embedding_flags,
    add_engine_flags,
    config_from_args,
    embedding_config,
)
from jaxpaged.config.pooling import leave_room, share_devices
from jaxpaged.config.settings import EngineConfig
from jaxpaged.errors import ConfigError, JaxPagedError

FITS, DOES_NOT_FIT, CANNOT_PLAN = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and the verdict."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except JaxPagedError as error:
        sys.stderr.write(f"jaxpaged plan: {error}\n")
        return CANNOT_PLAN


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="jaxpaged plan",
        description="Say what fits on a device, before any weight is read.",
        epilog=(__doc__ or "").split("\n\n")[1],
    )
    parser.add_argument("path", metavar="MODEL", nargs="?", help="directory, GGUF file or hub id")
    parser.add_argument(
        "--gpu", default="", help="a GPU's name, as H200, or its GiB (default: the device here)"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the largest programs for the device here and say what they need "
        "(by itself where that is a GPU)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    add_engine_flags(parser)
    add_embedding_flags(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.path is not None:
        setattr(args, "model.model", args.path)
    config = config_from_args(args)
    if not config.model.model:
        raise ConfigError("MODEL is missing: a directory, GGUF file or hub id")
    if args.gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"  # the device meant need not be here
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.compile and (args.gpu or config.parallel.num_devices > 1):
        raise ConfigError("--compile is for one device that is here: leave out --gpu, -tp and -pp")
    return _print_plan(config, args)


def _print_plan(config: EngineConfig, args: argparse.Namespace) -> int:
    from jaxpaged.engine import advice, capacity, memory, opening  # bring JAX, which takes seconds
    from jaxpaged.engine.compiled_memory import compiled_workspace
    from jaxpaged.engine.pooling.memory import planned_bytes
    from jaxpaged.engine.swapping import swap_limits
    from jaxpaged.sharding import planned_placement

    gpu, num_devices = args.gpu, config.parallel.num_devices

    memory.limit_device_memory(config.cache.gpu_memory_utilization)
    device = memory.named_device(gpu) if gpu else memory.present_device(config)
    platform = "cpu" if device.is_cpu else "gpu"
    dtype = opening.model_dtype(config.model.dtype, platform)
    embedding, embedding_bytes = embedding_config(args), 0
    if embedding is not None and share_devices(config, embedding):
        its_dtype = opening.model_dtype(embedding.model.dtype, platform)
        embedding_bytes = planned_bytes(embedding, its_dtype, device)
        config = leave_room(config, embedding_bytes / device.total_bytes)
    # of a hub model only the small files are fetched
    shapes_only = dataclasses.replace(config.model, load_format="dummy")
    placement = planned_placement(config.parallel)
    files = opening.open_files(
        dataclasses.replace(config, model=shapes_only), dtype, placement=placement
    )
    model, weights = files.config, capacity.weight_bytes(files.all_params, files.config, placement)

    def replan(changed: EngineConfig) -> capacity.MemoryPlan:
        return capacity.plan_memory(
            changed, model, weights, dtype, device, files.draft and files.draft.config
        )

    plan = replan(config)
    compiled = None
    if args.compile or (plan.fits and num_devices == 1 and not (gpu or device.is_cpu)):
        compiled = compiled_workspace(files, plan, dtype, config.scheduler.speculation)
    num_host_pages = swap_limits(config, plan)["num_host_pages"]
    verdict = "fits" if plan.fits else f"does not fit: {advice.refusal(plan, replan, config)}"
    if args.json:
        numbers = _numbers(plan, dtype.name, config, verdict)
        numbers |= {"embedding_bytes": embedding_bytes, "compiled_workspace_bytes": compiled}
        lines = [json.dumps(numbers | {"num_host_blocks": num_host_pages})]
    else:
        each = f", each of {num_devices} devices" if num_devices > 1 else ""
        lines = [f"{files.path.name}, {dtype.name}{each}"]
        lines += plan.lines() if plan.fits else plan.lines()[:-3]
        lines += _lines_beside(plan, config, num_host_pages, embedding_bytes, compiled)
        lines.append(f"verdict            {verdict}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return FITS if plan.fits else DOES_NOT_FIT


def _lines_beside(
    plan: Any, config: EngineConfig, host_pages: int, embedding: int, compiled: int | None
) -> Iterator[str]:
    """What there is beside one device's own plan; bytes but for the pages."""
    from jaxpaged.engine.capacity import gib

    if compiled is not None:
        yield f"compiled           {gib(compiled)} of workspace in the largest step"
    if host_pages:
        yield f"host pages         {host_pages} in {config.cache.swap_space:g} GiB"
    if embedding:
        yield f"embedding model    {gib(embedding)} of the device beside this"
    if (replicas := config.parallel.data_parallel_size) > 1:
        num_devices = replicas * config.parallel.num_devices
        yield (
            f"replicas           {replicas} like this on {num_devices} devices, "
            f"each with a whole model; {replicas * plan.max_num_seqs} sequences run at most"
        )


def _numbers(plan: Any, dtype: str, config: EngineConfig, verdict: str) -> dict[str, Any]:
    names = ("limit", "weights", "slots", "workspace", "margin", "page")
    return {
        "device": plan.device.name,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
        "data_parallel_size": config.parallel.data_parallel_size,
        "dtype": dtype,
        **{f"{name}_bytes": getattr(plan, name) for name in names},
        "num_gpu_blocks": plan.num_pages,
        "block_size": plan.page_size,
        "max_model_len": plan.model.max_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "concurrency": round(plan.concurrency, 2),
        "fits": plan.fits,
        "verdict": verdict,
    }


if __name__ == "__main__":
    sys.exit(main())
