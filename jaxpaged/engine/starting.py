"""What a start needs of its programs: do the settings go together, what finds and compiles them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxpaged.arrays import Params
from jaxpaged.config.settings import EngineConfig, ParallelSettings
from jaxpaged.core.buckets import BucketLadder
from jaxpaged.engine.capacity import MemoryPlan
from jaxpaged.engine.devices import count_gpus
from jaxpaged.engine.drafting import DraftModel
from jaxpaged.engine.executables import ExecutableStore, default_cache_dir
from jaxpaged.engine.lowering import LoweringProcesses, lowering_setup
from jaxpaged.engine.program_source import ProgramSource, shapes_of
from jaxpaged.engine.programs import Programs, num_processes
from jaxpaged.engine.runner import Runner
from jaxpaged.errors import ConfigError
from jaxpaged.layers.attention import AttentionOp
from jaxpaged.layers.sampling import LogitsProcessor
from jaxpaged.models.stages import split_model
from jaxpaged.sharding import Placement, laid_out
from jaxpaged.weights.loader import LoadedModel


def refuse_combinations(
    config: EngineConfig, processors: Mapping[str, LogitsProcessor] | None
) -> None:
    """Raise ConfigError for what no mesh runs."""
    num_stages = config.parallel.pipeline_parallel_size
    num_steps = config.scheduler.num_scheduler_steps or 1
    if num_stages > 1 and num_steps > 1:
        raise ConfigError(
            f"--num-scheduler-steps is {num_steps}: such steps go to the device as one program, "
            f"which --pipeline-parallel-size {num_stages} cuts into stages: leave out one of them"
        )
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
    processors: Mapping[str, LogitsProcessor],
    early: LoweringProcesses | None = None,
) -> list[Programs]:
    """What finds and compiles the programs of each stage, of which there mostly is one.

    Of the page pool only its shape is needed. `early` are processes that lower, started already.
    """
    is_plain = attention is None and not processors  # nothing that only this process knows
    folder = cache_folder(config) if is_plain else None
    start_processes = None
    if can_be_told(config.parallel, attention, processors):
        setup = lowering_setup(config, plan.pools, plan.model.max_len)
        start_processes = partial(_told, early, config, setup)
    model = plan.model if placement is None else laid_out(plan.model, placement.num_shards)
    num_shards = 1 if placement is None else placement.num_shards
    draft = DraftModel.of(loaded, config.scheduler.speculation, num_shards)
    made: list[Programs] = []
    for stage in split_model(model, loaded.graphdef, shapes_of(loaded.all_params), placement):
        source = ProgramSource(
            stage.graphdef,
            stage.params,
            stage.model,
            num_pages=plan.pools.num_pages,
            num_local_pages=plan.pools.num_local_pages,
            page_size=plan.page_size,
            max_num_seqs=plan.max_num_seqs,
            dtype=dtype,
            processors=tuple(processors.values()),
            swaps=config.cache.swap_space > 0,
            num_scheduler_steps=plan.num_scheduler_steps,
            logprobs_mode=config.model.logprobs_mode,
            mesh=stage.mesh,
            stage=stage.kind,
            has_local_table=plan.pools.has_both,
            draft=draft,
        )
        devices = [] if stage.mesh is None else list(stage.mesh.devices.flat)
        store = ExecutableStore(folder, source.identity(), devices)
        made.append(Programs(source, store, start_processes))
    return made


def compiles_all(config: EngineConfig, warm: bool, is_cpu: bool) -> bool:
    """Whether every program is to be ready at the start; see `build_engine`."""
    wanted = config.compile.warmup
    return wanted == "all" or (wanted == "auto" and warm and not is_cpu)


def can_be_told(
    parallel: ParallelSettings,
    attention: AttentionOp | None,
    processors: Mapping[str, LogitsProcessor],
) -> bool:
    """Whether another process can lower the programs from the configuration alone."""
    # an export does not say how its arguments are split
    return parallel.num_devices == 1 and attention is None and not processors


@contextmanager
def lowering_early(config: EngineConfig, is_wanted: bool) -> Iterator[LoweringProcesses | None]:
    """Processes that will lower, started before this one opens its device: they load meanwhile.

    None where programs are on disk, for most likely all are, and where no GPU is seen: on a CPU few
    programs are compiled.
    """
    is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not count_gpus()
    if is_cpu or not is_wanted or _has_programs(config):
        yield None
        return
    processes = LoweringProcesses(num_processes())
    try:
        yield processes
    finally:
        processes.close()


def _has_programs(config: EngineConfig) -> bool:
    folder = cache_folder(config)
    return folder is not None and folder.is_dir() and any(folder.iterdir())


def _told(
    early: LoweringProcesses | None, config: EngineConfig, setup: dict[str, Any], count: int
) -> LoweringProcesses:
    processes = early
    if processes is None:
        processes = LoweringProcesses(count)
        processes.prepare(config)
    processes.tell(setup)
    return processes


def cache_folder(config: EngineConfig) -> Path | None:
    """Where finished programs are kept, or None where they are not.

    What a CPU got from JAX's own cache cannot be written once more: it is there already.
    """
    given = config.compile.compile_cache_dir
    is_jax_s = jax.config.jax_compilation_cache_dir is not None and jax.default_backend() == "cpu"
    if given == "" or is_jax_s:
        return None
    return Path(given) if given else default_cache_dir()


def warm_up(programs: Sequence[Programs], ladder: BucketLadder, show_progress: bool) -> None:
    """Have every program ready, with a bar that tells how many are."""
    for stage in programs:
        with tqdm(desc="programs", disable=not show_progress) as bar:

            def notice(done: int, total: int, bar: Any = bar) -> None:
                bar.total, bar.n = total, done
                bar.refresh()

            stage.warm_up(ladder, notice)


def make_runner(
    plan: MemoryPlan,
    loaded: LoadedModel,
    placement: Placement | None,
    programs: Sequence[Programs],
    ladder: BucketLadder,
) -> Runner:
    """What runs them, with an empty page pool."""

    def split(params: Params) -> list[Params]:
        stages = split_model(loaded.config, loaded.graphdef, params, placement)
        return [stage.params for stage in stages]

    largest = max([stage.source.largest_words(ladder) for stage in programs])
    return Runner(plan.model, loaded.all_params, programs, split, largest)
