"""Puts an engine together from its configuration, and says how long each part took."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.files import read_object
from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import BucketLadder
from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.recording import RecordedScheduler
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.advice import memory_explained, plan_or_refuse
from jaxpaged.engine.capacity import MemoryPlan, weight_bytes
from jaxpaged.engine.collector import calm_collector
from jaxpaged.engine.devices import use_devices
from jaxpaged.engine.drafting import draft_cost
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.engine.memory import bytes_in_use, limit_device_memory, present_device, watch_devices
from jaxpaged.engine.opening import ladder_of, model_dtype, open_files
from jaxpaged.engine.page_metrics import watch_pages
from jaxpaged.engine.starting import (
    can_be_told,
    compiles_all,
    lowering_early,
    make_programs,
    make_runner,
    refuse_combinations,
    warm_up,
)
from jaxpaged.engine.swapping import swap_limits
from jaxpaged.engine.texts import template_for, tokenizer_for
from jaxpaged.layers.attention import AttentionOp
from jaxpaged.layers.sampling import LogitsProcessor
from jaxpaged.metrics import EngineMetrics
from jaxpaged.sharding import make_placement
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# of a small model's decode step by itself, in steps of which a program takes several: at 1 to 128
# rows on an H200; drafts are weighed by it until they have been timed
SINGLE_COST = 2.0
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class EngineParts:
    """A running engine and what its callers need beside it. `phases_s` are seconds by phase."""

    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model: ModelConfig
    config: EngineConfig
    default_sampling: dict[str, Any]
    phases_s: dict[str, float]
    plan: MemoryPlan


def build_engine(
    config: EngineConfig,
    *,
    attention: AttentionOp | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    warm: bool = False,
    show_progress: bool = False,
) -> EngineParts:
    """Load the model, size the page pool, prepare the programs.

    Args:
        attention: takes the place of paged attention in every layer; programs are then not kept on
            disk, since a function has no name that outlives the process.
        warm: on a GPU, compile every bucket now where `--warmup` is auto. On a CPU a program takes
            seconds even to load, so each comes when it is first met.

    Raises:
        ConfigError, WeightsError: nothing was started; the text says what to change.
    """
    refuse_combinations(config, logits_processors)
    phases: dict[str, float] = {}
    limit_device_memory(config.cache.gpu_memory_utilization)
    use_devices(config.parallel)
    processors = dict(logits_processors or {})
    is_told = can_be_told(config.parallel, attention, processors)
    with lowering_early(config, compiles_all(config, warm, is_cpu=False) and is_told) as early:
        with _timed(phases, "device"):
            dtype = model_dtype(config.model.dtype, jax.default_backend())
            device = present_device(config)
            placement = make_placement(config.parallel)
        if early:
            early.prepare(config)
        with _timed(phases, "weights"):
            files = open_files(config, dtype, attention, placement)
            weights = weight_bytes(files.all_params, files.config, placement)
            draft = files.draft and files.draft.config
            # refuses what cannot fit before a weight is read
            plan_or_refuse(config, files.config, weights, dtype, device, draft)
            loaded = files.load(config.model.seed)
        with _timed(phases, "tokenizer"):
            tokenizer = tokenizer_for(config.model, loaded.path)
            template = template_for(config.model, tokenizer)
        weights = max(bytes_in_use(placement and placement.devices), weights)
        plan = plan_or_refuse(config, loaded.config, weights, dtype, device, draft)
        config = settled(config, plan)
        ladder = ladder_of(config)
        programs = make_programs(
            config, plan, loaded, dtype, placement, attention, processors, early
        )
        if compiles_all(config, warm, is_cpu=device.is_cpu):
            # before the pool takes the memory in which XLA tries ways to multiply
            with _timed(phases, "programs"), memory_explained(plan):
                warm_up(programs, ladder, show_progress)
    with _timed(phases, "page pool"), memory_explained(plan):
        runner = make_runner(plan, loaded, placement, programs, ladder)
    scheduler = _make_scheduler(config, plan, ladder, draft_cost(files))
    metrics = _metrics(config, plan, dtype, scheduler)
    engine = Engine(
        runner,
        scheduler,
        _make_builder(plan, scheduler, processors),
        ladder,
        tokenizer,
        metrics,
        max_in_flight=runner.num_stages + config.scheduler.async_scheduling,
        num_scheduler_steps=plan.num_scheduler_steps,
    )
    inputs = InputProcessor(
        tokenizer,
        plan.model.vocab,
        plan.model.max_len,
        config.model.seed,
        tuple(processors),
        config.cache.page_size if config.cache.enable_prefix_caching else 0,
    )
    calm_collector()
    log.info("ready: %s", ", ".join(f"{name} {s:.1f} s" for name, s in phases.items()))
    return EngineParts(
        engine,
        inputs,
        tokenizer,
        template,
        plan.model,
        config,
        default_sampling_params(loaded.path, config),
        phases,
        plan,
    )


def _metrics(
    config: EngineConfig, plan: MemoryPlan, dtype: np.dtype, scheduler: Scheduler
) -> EngineMetrics:
    rank = config.parallel.data_parallel_rank
    metrics = EngineMetrics(_served_name(config), plan.model.max_len, rank)
    watch_devices(metrics, config.parallel.device_ids)
    watch_pages(metrics, scheduler)
    metrics.cache_config(
        block_size=config.cache.page_size,
        num_gpu_blocks=plan.num_pages,
        cache_dtype=np.dtype(dtype).name,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
    )
    if config.scheduler.speculation is not None:
        metrics.enable_speculation(config.scheduler.speculation.num_speculative_tokens)
    return metrics


def _make_scheduler(
    config: EngineConfig, plan: MemoryPlan, ladder: BucketLadder, cost_of_guess: float
) -> Scheduler:
    cache, sched, model = config.cache, config.scheduler, plan.model
    num_stages = config.parallel.pipeline_parallel_size
    # not where a step's time is not that of its tokens, and the rest of a prompt would keep decode
    # steps from being one program; with stages nothing was measured
    is_filled = num_stages == 1 and plan.num_scheduler_steps == 1
    pool, local = plan.pools.make(plan.page_size, model.local_window)
    limits = SchedulerLimits(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=model.max_len,
        enable_prefix_caching=cache.enable_prefix_caching,
        long_prefill_token_threshold=sched.long_prefill_token_threshold,
        reserve_full_prompt=sched.scheduler_reserve_full_isl,
        admission=sched.admission_mode,
        scheduling_policy=sched.policy,
        speculation=sched.speculation,
        num_stages=num_stages,
        step_sizes=ladder.step_sizes() if is_filled else (),
        draft_cost=cost_of_guess,
        single_cost=SINGLE_COST if plan.num_scheduler_steps > 1 else 1.0,
        **swap_limits(config, plan),
    )
    scheduler = Scheduler(limits, pool, PrefixCache(pool), local)
    if sched.record is not None:
        scheduler = cast("Scheduler", RecordedScheduler(scheduler, Path(sched.record)))
    return scheduler


def _make_builder(
    plan: MemoryPlan, scheduler: Scheduler, processors: Mapping[str, LogitsProcessor]
) -> BatchBuilder:
    page_size, model = plan.page_size, plan.model
    bits = {name: bit for bit, name in enumerate(processors)}
    sizes = -(-model.max_len // page_size), page_size, plan.max_num_seqs, model.vocab
    return BatchBuilder(*sizes, bits, scheduler.local, plan.pools.has_both)


def default_sampling_params(path: Path, config: EngineConfig) -> dict[str, Any]:
    """Sampling fields from the model's generation_config.json and the operator's override."""
    found: dict[str, Any] = {}
    file = path / "generation_config.json"
    if config.model.generation_config == "auto" and file.is_file():
        given = read_object(file)
        found = {key: given[key] for key in SAMPLING_KEYS if given.get(key) is not None}
        if given.get("max_new_tokens"):
            found["max_tokens"] = given["max_new_tokens"]
    found |= config.model.override_generation_config
    SamplingParams(**found)  # refuses nonsense now rather than at the first request
    return found


def settled(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    """The configuration with what was left to the planner filled in, and said."""
    if plan.model.max_len < plan.wanted_len:
        log.warning(
            "context shortened from %d to the %d tokens that fit",
            plan.wanted_len,
            plan.model.max_len,
        )
    log.info("plan: %s", "; ".join(" ".join(line.split()) for line in plan.lines()))
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_scheduler_steps=plan.num_scheduler_steps,
    )
    return dataclasses.replace(config, scheduler=scheduler)


def _served_name(config: EngineConfig) -> str:
    return (
        config.model.served_model_name[0] if config.model.served_model_name else config.model.model
    )


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    phases[name] = time.monotonic() - start
