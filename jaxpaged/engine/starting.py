"""What a start needs of its programs: do the settings go together, what finds and compiles them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.buckets import BucketLadder
from jaxpaged.engine.capacity import MemoryPlan
from jaxpaged.engine.executables import ExecutableStore, default_cache_dir
from jaxpaged.engine.lowering import LoweringProcesses, lowering_setup
from jaxpaged.engine.program_source import ProgramSource
from jaxpaged.engine.programs import Programs
from jaxpaged.errors import ConfigError
from jaxpaged.layers.attention import AttentionOp
from jaxpaged.layers.sampling import LogitsProcessor
from jaxpaged.sharding import Placement, laid_out
from jaxpaged.weights.loader import LoadedModel


def refuse_combinations(
    config: EngineConfig, processors: Mapping[str, LogitsProcessor] | None
) -> None:
    """Raise ConfigError for what no mesh runs."""
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size is for plans in this version: take 1")
    if processors and config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "logits_processors see whole rows of logits, which --tensor-parallel-size "
            f"{config.parallel.tensor_parallel_size} splits: leave out one of them"
        )


def make_programs(
    config: EngineConfig,
    plan: MemoryPlan,
    loaded: LoadedModel,
    dtype: np.dtype,
    placement: Placement | None,
    attention: AttentionOp | None,
    processors: tuple[LogitsProcessor, ...],
) -> Programs:
    """What finds and compiles the programs; of the page pool only its shape is needed."""
    source = ProgramSource(
        loaded.graphdef,
        loaded.params,
        plan.model if placement is None else laid_out(plan.model, placement.num_shards),
        num_pages=plan.pools.num_pages,
        num_local_pages=plan.pools.num_local_pages,
        page_size=plan.page_size,
        max_num_seqs=plan.max_num_seqs,
        dtype=dtype,
        processors=processors,
        swaps=config.cache.swap_space > 0,
        num_scheduler_steps=plan.num_scheduler_steps,
        logprobs_mode=config.model.logprobs_mode,
        mesh=placement and placement.stages[0],
    )
    is_plain = attention is None and not processors  # nothing that only this process knows
    is_cacheable = is_plain and config.compile.compile_cache_dir != ""
    folder = Path(config.compile.compile_cache_dir or default_cache_dir()) if is_cacheable else None
    devices = [] if placement is None else placement.devices
    store = ExecutableStore(folder, source.identity(), devices)
    start_processes = None
    if is_plain and placement is None:  # an export does not say how its arguments are split
        told = lowering_setup(config, plan.pools, plan.model.max_len)
        start_processes = partial(LoweringProcesses, setup=told)
    return Programs(source, store, start_processes)


def warm_up(programs: Programs, ladder: BucketLadder, show_progress: bool) -> None:
    """Have every program ready, with a bar that tells how many are."""
    buckets = ladder.all_buckets()
    with tqdm(total=len(buckets), desc="programs", disable=not show_progress) as bar:

        def notice(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        programs.warm_up(buckets, notice)
