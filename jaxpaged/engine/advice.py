"""What to say when a plan does not fit: which flags help, with values that were tried."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.capacity import LEAST_PAGES, MemoryPlan, gib, plan_memory
from jaxpaged.engine.memory import GIB, DeviceMemory
from jaxpaged.errors import ConfigError

LEAST_STEP_TOKENS = 256  # below this prompts become slow: not advised
MOST_SHARE = 0.97  # of the device; the rest is the driver's and the programs'
_ALLOCATION = re.compile(r"allocat\w*\D{0,20}?([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

type Replan = Callable[[EngineConfig], MemoryPlan]
type _Change = tuple[str, EngineConfig] | None  # a flag with its value, and what it makes


def plan_or_refuse(
    config: EngineConfig,
    model: ModelConfig,
    weights: int,
    dtype: np.dtype,
    device: DeviceMemory,
    draft: ModelConfig | None = None,
) -> MemoryPlan:
    """`plan_memory`, or one line that says what does not fit and which flags help.

    Raises:
        ConfigError: it does not fit, or settings contradict each other.
    """

    def replan(changed: EngineConfig) -> MemoryPlan:
        return plan_memory(changed, model, weights, dtype, device, draft)

    plan = replan(config)
    if not plan.fits:
        raise refusal(plan, replan, config)
    return plan


def ran_out(plan: MemoryPlan, error: BaseException) -> ConfigError | None:
    """What to say of a device that ran out of memory although the plan fitted; None otherwise."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = _ALLOCATION.search(text)
    missing = int(float(found[1]) * _UNITS[found[2]]) if found else plan.workspace
    pool = max(plan.num_pages - -(-missing // plan.page), LEAST_PAGES) * plan.page
    flags = [f"--kv-cache-memory-bytes {pool}"]
    if plan.max_num_batched_tokens // 2 >= max(LEAST_STEP_TOKENS, plan.max_num_seqs):
        flags.append(f"--max-num-batched-tokens {plan.max_num_batched_tokens // 2}")
    if plan.max_num_seqs > 1:
        flags.append(f"--max-num-seqs {plan.max_num_seqs // 2}")
    return ConfigError(
        f"{plan.device.name} ran out of memory: {gib(missing)} more needed, {gib(plan.limit)} "
        f"shared out (weights {gib(plan.weights)}, workspace {gib(plan.workspace)}, pool "
        f"{gib(plan.num_pages * plan.page)}); any one of these helps: {', '.join(flags)}"
    )


@contextmanager
def memory_explained(plan: MemoryPlan) -> Iterator[None]:
    """Turn XLA's own words for a device without memory into one line with flags.

    Raises:
        ConfigError: the device ran out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = ran_out(plan, error)
        if said is None:
            raise
        raise said from error


def refusal(plan: MemoryPlan, replan: Replan, config: EngineConfig) -> ConfigError:
    """The one line for what does not fit: needed, free, and the flags that help, with values."""
    pages = f"{plan.least_pages} pages {gib(plan.least_pages * plan.page)}"
    return ConfigError(
        f"{gib(plan.needed)} needed ({'' if plan.device.is_cpu else _others(plan) + ', '}{pages}), "
        f"{gib(plan.limit)} free on {plan.device.name}: {advice(plan, replan, config)}"
    )


def _others(plan: MemoryPlan) -> str:
    """What a GPU's memory holds beside pages."""
    return (
        f"weights {gib(plan.weights)}, workspace {gib(plan.workspace + plan.slots)}, "
        f"kept free {gib(plan.margin)}"
    )


def advice(plan: MemoryPlan, replan: Replan, config: EngineConfig) -> str:
    """Flags of which each is enough by itself, else flags that are enough together."""
    enough: list[str] = []
    for change in (_pool_flag, _share_flag, _tokens_flag, _seqs_flag):
        found = change(plan, replan, config)
        if found is not None and replan(found[1]).fits:
            enough.append(found[0])
    together: list[str] = []
    changed, missing = config, plan.needed - plan.limit
    for change in (_share_flag, _tokens_flag, _seqs_flag, _pool_flag):
        so_far = replan(changed)
        found = None if so_far.fits else change(so_far, replan, changed)
        if found is not None:
            after = replan(found[1])
            if after.needed - after.limit < missing:
                together.append(found[0])
                changed, missing = found[1], after.needed - after.limit
    if len(enough) > 1:
        return f"any one of these helps: {', '.join(enough[:3])}"
    if enough:
        return f"this helps: {enough[0]}"
    if replan(changed).fits:
        return f"together these help: {', '.join(together)}"
    least = f"the weights alone take {gib(plan.weights)}"
    if plan.weights < plan.limit and not plan.device.is_cpu:
        smallest = replan(changed)
        least = f"the least is {gib(smallest.needed)} ({_others(smallest)})"
    return f"no flag is enough, {least}: take a smaller model"


def _pool_flag(plan: MemoryPlan, replan: Replan, config: EngineConfig) -> _Change:
    """Another size of what the operator fixed: pool or context."""
    pages, cache = plan.room // plan.page, config.cache
    if pages < LEAST_PAGES:
        return None
    if cache.num_gpu_blocks_override is not None:
        cache = dataclasses.replace(cache, num_gpu_blocks_override=pages)
        return f"--num-gpu-blocks-override {pages}", dataclasses.replace(config, cache=cache)
    if cache.kv_cache_memory_bytes is not None:
        size = min(pages, max(plan.num_pages, plan.least_pages)) * plan.page
        cache = dataclasses.replace(cache, kv_cache_memory_bytes=size)
        return f"--kv-cache-memory-bytes {size}", dataclasses.replace(config, cache=cache)
    length = (pages - 1) * plan.page_size
    model = dataclasses.replace(config.model, max_model_len=length)
    return f"--max-model-len {length}", dataclasses.replace(config, model=model)


def _share_flag(plan: MemoryPlan, replan: Replan, config: EngineConfig) -> _Change:
    cache = config.cache
    if plan.device.is_cpu:
        space = math.ceil(1000 * plan.needed / GIB) / 1000
        cache = dataclasses.replace(cache, cpu_kvcache_space=space)
        return f"--cpu-kvcache-space {space:g}", dataclasses.replace(config, cache=cache)
    share = math.ceil(100 * plan.needed / plan.device.total_bytes) / 100
    share = min(share, MOST_SHARE)
    if share <= cache.gpu_memory_utilization:
        return None
    cache = dataclasses.replace(cache, gpu_memory_utilization=share)
    return f"--gpu-memory-utilization {share:g}", dataclasses.replace(config, cache=cache)


def _tokens_flag(plan: MemoryPlan, replan: Replan, config: EngineConfig) -> _Change:
    least = max(LEAST_STEP_TOKENS, plan.max_num_seqs)
    return _halved(
        "max_num_batched_tokens", plan.max_num_batched_tokens, least, plan, replan, config
    )


def _seqs_flag(plan: MemoryPlan, replan: Replan, config: EngineConfig) -> _Change:
    return _halved("max_num_seqs", plan.max_num_seqs, 1, plan, replan, config)


def _halved(
    name: str, value: int, least: int, plan: MemoryPlan, replan: Replan, config: EngineConfig
) -> _Change:
    """The first half, quarter, ... of a setting with which it fits, or the least one."""
    changed: _Change = None
    while not plan.device.is_cpu and value // 2 >= least:
        value //= 2
        scheduler = dataclasses.replace(config.scheduler, **{name: value})
        flag = f"--{name.replace('_', '-')} {value}"
        changed = flag, dataclasses.replace(config, scheduler=scheduler)
        if replan(changed[1]).fits:
            break
    return changed
