"""A process that lowers programs for another one: `python -m jaxpaged.engine.lowering_child`."""

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.config.settings import GROUPS, EngineConfig
from jaxpaged.engine.drafting import DraftModel
from jaxpaged.engine.executables import load_kernel_runtime
from jaxpaged.engine.lowering import FAILED, export_program
from jaxpaged.engine.opening import ladder_of, model_dtype, open_files
from jaxpaged.engine.program_source import ProgramSource
from jaxpaged.weights.loader import ModelFiles


def main() -> None:
    """Read settings and setup, then answer names with exports until the input ends."""
    gc.disable()  # costs a fifth of the lowering, and this process lasts a minute
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    config = _config(json.loads(requests.readline()))
    load_kernel_runtime()
    dtype = model_dtype(config.model.dtype, jax.default_backend())
    # what the engine may have to fetch first is opened when it has
    is_here = Path(config.model.model).exists() and config.scheduler.speculation is None
    files = open_files(config, dtype) if is_here else None
    setup = json.loads(requests.readline())
    config = _config(setup["config"])
    source = _source(config, setup, files or open_files(config, dtype), dtype)
    programs = source.all_programs(ladder_of(config))
    for line in requests:
        try:
            program = programs[line.decode().rstrip("\n")]()
            data = export_program(program.function, program.arguments)
        except Exception as error:  # whatever it is, the other side can do without
            data = FAILED + f"{type(error).__name__}: {error}".encode()
        answers.write(len(data).to_bytes(8) + data)
        answers.flush()


def _source(
    config: EngineConfig, setup: dict[str, Any], files: ModelFiles, dtype: np.dtype
) -> ProgramSource:
    """The same as the engine's, from shapes alone."""
    max_num_seqs = config.scheduler.max_num_seqs
    assert max_num_seqs is not None
    return ProgramSource(
        files.graphdef,
        files.all_params,
        dataclasses.replace(files.config, max_len=setup["max_len"]),
        num_pages=setup["num_pages"],
        num_local_pages=setup["num_local_pages"],
        page_size=config.cache.page_size,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        swaps=config.cache.swap_space > 0,
        logprobs_mode=config.model.logprobs_mode,
        num_scheduler_steps=config.scheduler.num_scheduler_steps or 1,
        draft=DraftModel.of(files, config.scheduler.speculation),
    )


def _config(data: dict[str, Any]) -> EngineConfig:
    def restored(group: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(x) if isinstance(x, list) else x for name, x in group.items()}

    groups: Any = {name: kind(**restored(data[name])) for name, kind in GROUPS.items()}
    return EngineConfig(**groups)


if __name__ == "__main__":
    main()
