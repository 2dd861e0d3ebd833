"""Engines on tiny models: one compiled runner, any number of host sides over it.

The page pool on the device is filled with NaN before each use, so that a stray read shows.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.config.speculation import Speculation
from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.core.limits import Admission, PreemptionMode, SchedulerLimits
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.factory import EngineParts, build_engine
from jaxpaged.engine.llm import LLM
from jaxpaged.metrics import EngineMetrics

PAGE_SIZE = 16
MAX_NUM_SEQS = 4
MOST_PAGES = 1 + MAX_NUM_SEQS * 256 // PAGE_SIZE

TINY_SETTINGS = {
    "block_size": PAGE_SIZE,
    "max_num_seqs": MAX_NUM_SEQS,
    "num_gpu_blocks_override": MOST_PAGES,
    "compile_cache_dir": "",
    "max_model_len": 256,
}

# few sizes, so that a test run compiles little: every sampler can do what `full` does
LADDER = BucketLadder(
    [
        Bucket("decode", "full", 1, 1),
        Bucket("decode", "full", 4, 4),
        Bucket("mixed", "full", 32, 4),
        Bucket("mixed", "full", 256, 4),
        Bucket("mixed", "scored", 64, 4),
        Bucket("draft", "greedy", 16, 4),
        Bucket("draft", "full", 16, 4),
    ]
)


def tiny_parts(model: Path, *, attention=None, **settings) -> EngineParts:
    """An engine with a page pool for MAX_NUM_SEQS sequences of 256 tokens, nothing compiled yet."""
    config = config_from_keywords(model=str(model), **TINY_SETTINGS | settings)
    return build_engine(config, attention=attention)


@dataclass
class TinyEngine:
    """A fresh scheduler, pool and cache over the compiled steps of `parts`."""

    parts: EngineParts
    num_pages: int = MOST_PAGES
    token_budget: int = 256
    max_in_flight: int = 2
    num_scheduler_steps: int = 1
    hash_bits: int = 256
    reserve_full_prompt: bool = False
    admission: Admission = "evict"
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionMode = "recompute"
    num_host_pages: int = 0
    poison: bool = True
    speculation: Speculation | None = None
    ladder: BucketLadder = LADDER
    num_local_pages: int = 0  # of a model with windows; 0: as many as planned
    ladder: BucketLadder = LADDER
    engine: Engine = field(init=False)

    def __post_init__(self):
        runner, model = self.parts.engine.runner, self.parts.model
        if self.poison:
            poison_pages(runner)
        pool, local, pools = PagePool(self.num_pages, PAGE_SIZE), None, self.parts.plan.pools
        if pools.num_local_pages:
            count = self.num_local_pages or pools.num_local_pages
            local = LocalPages(pool, model.local_window, count)
        sizes = -(-model.max_len // PAGE_SIZE), PAGE_SIZE, MAX_NUM_SEQS, model.vocab
        limits = SchedulerLimits(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=self.token_budget,
            max_model_len=model.max_len,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            num_host_pages=self.num_host_pages,
            max_num_scored_tokens=64,
            reserve_full_prompt=self.reserve_full_prompt,
            admission=self.admission,
            speculation=self.speculation,
            num_stages=runner.num_stages,
            step_sizes=self.ladder.step_sizes() if runner.num_stages == 1 else (),
        )
        self.engine = Engine(
            runner,
            Scheduler(limits, pool, PrefixCache(pool, self.hash_bits), local),
            BatchBuilder(*sizes, {}, local, pools.has_both),
            self.ladder,
            self.parts.tokenizer,
            EngineMetrics("tiny", model.max_len),
            self.max_in_flight + runner.num_stages - 1,
            self.num_scheduler_steps,
        )

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def llm(self) -> LLM:
        return LLM.from_parts(dataclasses.replace(self.parts, engine=self.engine))

    def generate(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        on_plan=None,
        num_pinned: int = 0,
    ):
        """Outputs in the order of the prompts; pages are accounted for after every step."""

        def watch(plan):
            self.scheduler.check()
            if on_plan is not None:
                on_plan(plan)

        self.engine.steps.on_step = watch
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.scheduler.check()
        assert self.scheduler.pool.num_held == num_pinned
        return outputs


def poison_pages(runner) -> None:
    """Fill the whole page pool with NaN."""
    state = runner.state
    pages = jax.tree.map(
        lambda x: jnp.full(x.shape, jnp.nan, x.dtype, device=x.sharding), state.kv_pages
    )
    runner.replace_state(dataclasses.replace(state, kv_pages=pages))
