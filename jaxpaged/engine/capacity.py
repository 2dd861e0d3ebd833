"""What fits: weights, workspace, pages, context and concurrency, known before a weight is read.

The same numbers size the page pool, choose what the operator left open, and word the refusal.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.local_capacity import (
    PageNeeds,
    PoolSizes,
    page_bytes,
    share_of,
)
from jaxpaged.engine.memory import GIB, DeviceMemory
from jaxpaged.engine.workspace import trial_bytes, workspace_bytes
from jaxpaged.errors import ConfigError
from jaxpaged.sharding import Placement, keys_of

CPU_MAX_NUM_SEQS, GPU_MAX_NUM_SEQS = 8, 256
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 256, 8192
USUAL_LEN = 512  # tokens that the default number of running sequences must find pages for
DISPATCH_S = 0.002  # that starting a program takes the host, about
CHAIN_LENGTH = 8  # decode steps of one program where the device takes less for a step
LEAST_PAGES = 3  # the null page, and two to write to
MARGIN_BYTES = GIB // 2  # never planned: holes between allocations, and errors of the estimate
ALIGNMENT = 256  # bytes; of every allocation


@dataclass(frozen=True)
class MemoryPlan:
    """One device's memory, in bytes. `model` has the context that will be served.

    `weights` and `page` are a device's share where several hold the model.
    """

    device: DeviceMemory
    model: ModelConfig
    wanted_len: int  # the context before it was shortened to what fits
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    limit: int
    weights: int
    slots: int
    workspace: int
    margin: int
    page: int  # in all layers
    num_pages: int  # the null page included; with local pages, what the pools' memory amounts to
    num_scheduler_steps: int
    least_pages: int  # fewer cannot serve what was asked for
    layer_kinds: tuple[LayerKind, ...]  # that a device has pages for
    draft_page: int = 0  # what of `page` is the draft model's

    @cached_property
    def pools(self) -> PoolSizes:
        """Pages and local pages."""
        model = dataclasses.replace(self.model, layer_kinds=self.layer_kinds)
        sizes = self.page_size, self.max_num_seqs, self.max_num_batched_tokens
        needs = PageNeeds(self.page, model, *sizes, self.draft_page)
        return needs.share_pool(self.num_pages * self.page)

    @property
    def room(self) -> int:
        """What is left for pages."""
        others = self.weights + self.slots + self.workspace + self.margin
        return self.limit if self.device.is_cpu else self.limit - others

    @property
    def needed(self) -> int:
        """The least that the whole takes of `limit`."""
        return self.least_pages * self.page + self.limit - self.room

    @property
    def fits(self) -> bool:
        return self.least_pages <= self.num_pages and self.num_pages * self.page <= self.room

    @property
    def pool_tokens(self) -> int:
        return (self.pools.num_pages - 1) * self.page_size

    def concurrency_at(self, length: int) -> float:
        """Sequences of so many tokens that the pool holds."""
        num_pages, pools = -(-length // self.page_size), self.pools
        held = (pools.num_pages - 1) / num_pages
        if not pools.num_local_pages:
            return held
        window_pages = min(num_pages, pools.local_pages_of_one)
        return min(held, (pools.num_local_pages - 1) / window_pages)

    @property
    def concurrency(self) -> float:
        """Sequences of the full context that the pool holds."""
        return self.concurrency_at(self.model.max_len)

    def lines(self) -> list[str]:
        """The plan in words, one item a line."""
        lines = [f"device             {gib(self.limit)} of {self.device.name} for this process"]
        if not self.device.is_cpu:
            lines += [
                f"weights            {gib(self.weights)}"
                + ", the draft model's included" * bool(self.draft_page),
                f"sequence slots     {gib(self.slots)} for {self.max_num_seqs} sequences",
                f"workspace          {gib(self.workspace)} for steps of "
                f"{self.max_num_batched_tokens} tokens, and {gib(self.margin)} kept free",
            ]
            read = f"{1000 * self.weights / self.device.bytes_per_s:.1f} ms"
            lines.append(
                f"steps a dispatch   {self.num_scheduler_steps}; weights are read in {read}, "
                f"a dispatch takes the host about {1000 * DISPATCH_S:g}"
            )
        pools, pool = self.pools, gib(self.num_pages * self.page)
        counts = f"{self.page_size} tokens, {self.pool_tokens} tokens, {self.page} bytes a page"
        if pools.num_local_pages:
            counts = f"{self.page_size} tokens in {pools.num_full_layers} layers, and "
            num_layers = len(self.layer_kinds) - pools.num_full_layers
            counts += f"{pools.num_local_pages - 1} in {num_layers} layers with a "
            counts += f"window of {self.model.local_window} tokens"
        return [
            *lines,
            f"page pool          {pool}: {pools.num_pages - 1} pages of {counts}",
            f"longest context    {self.model.max_len} tokens",
            f"concurrency        {self.concurrency:.1f} sequences of that length; "
            f"{self.max_num_seqs} run at most",
        ]


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    weights: int,
    dtype: np.dtype,
    device: DeviceMemory,
    draft: ModelConfig | None = None,
) -> MemoryPlan:
    """Share out a device's memory; fills in what the configuration leaves to us.

    Args:
        weights: bytes on this device, where several hold the model; a draft model's included.
        dtype: of activations and KV.
        draft: the model that guesses tokens, if there is one.

    Raises:
        ConfigError: settings that contradict each other or the model, whatever the memory.
    """
    max_num_seqs = config.scheduler.max_num_seqs
    others = weights, dtype, device, draft
    if max_num_seqs is not None:
        return _plan(config, model, *others, max_num_seqs)
    most = CPU_MAX_NUM_SEQS if device.is_cpu else GPU_MAX_NUM_SEQS
    budget = config.scheduler.max_num_batched_tokens or most
    sizes = [2**n for n in range(most.bit_length() - 1, -1, -1) if 2**n <= budget]
    for size in sizes:
        plan = _plan(config, model, *others, size)
        usual = min(plan.model.max_len, USUAL_LEN)
        if plan.fits and plan.concurrency_at(usual) >= size:
            return plan
    return _plan(config, model, *others, 1)


def tree_bytes(tree: Any) -> int:
    """Memory of arrays or shapes on one device of those that they are split over."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = sharding.shard_shape(x.shape) if isinstance(sharding, NamedSharding) else x.shape
        return _aligned(math.prod(shape) * x.dtype.itemsize)

    return sum(map(size, jax.tree.leaves(tree)))


def weight_bytes(params: Params, model: ModelConfig, placement: Placement | None) -> int:
    """Memory of the weights, arrays or shapes, on the device that holds the most."""
    if placement is None:
        return tree_bytes(params)
    totals = [0] * len(placement.stages)
    for path, leaf in jax.tree.leaves_with_path(params):
        totals[placement.stage_of(keys_of(path), model.num_layers)] += tree_bytes(leaf)
    if model.tied_embeddings and len(totals) > 1:
        totals[-1] += tree_bytes(params["embedding"])  # which makes the logits there
    return max(totals)


def _plan(
    config: EngineConfig,
    model: ModelConfig,
    weights: int,
    dtype: np.dtype,
    device: DeviceMemory,
    draft: ModelConfig | None,
    max_num_seqs: int,
) -> MemoryPlan:
    cache, wanted = config.cache, config.model.max_model_len
    budget = _check_sizes(config, model, device, max_num_seqs)
    is_fixed = wanted is not None and wanted > 0
    if is_fixed:
        model = dataclasses.replace(model, max_len=wanted)
    share = share_of(model, config.parallel)
    draft_share = None if draft is None else share_of(draft, config.parallel)
    draft_page = 0 if draft_share is None else page_bytes(draft_share, cache.page_size, dtype)
    page = page_bytes(share, cache.page_size, dtype) + draft_page
    needs = PageNeeds(page, share, cache.page_size, max_num_seqs, budget, draft_page)
    most_useful = needs.most_useful
    num_stages = config.parallel.pipeline_parallel_size
    shares = [one for one in (share, draft_share) if one is not None]
    sizes = dtype, budget, max_num_seqs
    guesses = config.scheduler.speculation
    more = {
        "num_draft_tokens": 0 if guesses is None else guesses.most_tokens(max_num_seqs, budget),
        "searches_by_kernel": device.is_hopper and config.parallel.tensor_parallel_size == 1,
        "gates_in_product": device.is_hopper,
        "other_sizes": (*config.compile.token_buckets, *config.compile.batch_buckets),
    }
    workspace = max([workspace_bytes(one, *sizes, num_stages, **more) for one in shares])
    trials = max([trial_bytes(one, *sizes) for one in shares])
    plan = MemoryPlan(
        device=device,
        model=model,
        wanted_len=model.max_len,
        page_size=cache.page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        limit=device.limit_bytes(config),
        weights=weights,
        slots=_aligned((max_num_seqs + 1) * share.vocab * 2),
        workspace=workspace,
        margin=MARGIN_BYTES + max(0, trials - workspace),
        page=page,
        num_pages=most_useful,
        num_scheduler_steps=_num_scheduler_steps(config, weights, device),
        least_pages=needs.least_of_one if is_fixed else min(LEAST_PAGES, most_useful),
        layer_kinds=share.layer_kinds,
        draft_page=draft_page,
    )
    if cache.num_gpu_blocks_override is not None:
        asked = cache.num_gpu_blocks_override
        # on a CPU the operator's word goes, whatever cpu_kvcache_space says
        limit = max(plan.limit, asked * page) if device.is_cpu else plan.limit
        return dataclasses.replace(plan, num_pages=asked, least_pages=asked, limit=limit)
    if cache.kv_cache_memory_bytes is not None:
        size = cache.kv_cache_memory_bytes
        limit = max(plan.limit, size) if device.is_cpu else plan.limit
        plan = dataclasses.replace(plan, num_pages=size // page, limit=limit)
    else:
        num_pages = min(max(plan.room // page, 0), most_useful)
        plan = dataclasses.replace(plan, num_pages=num_pages)
    if is_fixed or plan.concurrency >= 1 or not plan.fits:
        return plan
    length = (plan.num_pages - 1) * plan.page_size  # with all pages kept
    if plan.pools.num_full_layers:
        length = max(length, plan.pool_tokens)
    if plan.pools.num_local_pages:  # planned again, for windows and shares depend on the length
        changed = dataclasses.replace(config.model, max_model_len=length)
        config = dataclasses.replace(config, model=changed)
        shorter = _plan(config, model, weights, dtype, device, draft, max_num_seqs)
        return dataclasses.replace(shorter, wanted_len=plan.wanted_len)
    return dataclasses.replace(plan, model=dataclasses.replace(model, max_len=length))


def _num_scheduler_steps(config: EngineConfig, weights: int, device: DeviceMemory) -> int:
    """Decode steps a dispatch: several where a single GPU would wait for its host."""
    sched = config.scheduler
    if sched.num_scheduler_steps is not None:
        return sched.num_scheduler_steps
    if device.is_cpu or config.parallel.num_devices > 1:
        return 1
    return CHAIN_LENGTH if weights / device.bytes_per_s < DISPATCH_S else 1


def _check_sizes(
    config: EngineConfig, model: ModelConfig, device: DeviceMemory, max_num_seqs: int
) -> int:
    """The token budget; refuses sizes that contradict each other."""
    wanted = config.model.max_model_len
    if wanted is not None and wanted > model.max_len:
        raise ConfigError(
            f"max_model_len is {wanted}, over the {model.max_len} positions of the model: lower it"
        )
    default = CPU_STEP_TOKENS if device.is_cpu else GPU_STEP_TOKENS
    budget = config.scheduler.max_num_batched_tokens or max(default, max_num_seqs)
    if budget < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}, under max_num_seqs of {max_num_seqs}: a step "
            "must hold a token of each running sequence; raise one or lower the other"
        )
    return budget


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
