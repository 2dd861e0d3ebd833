"""Puts an embedding engine together from its configuration."""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import EncoderConfig, ModelConfig
from jaxpaged.config.pooling import PoolingModel
from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.pooling import RowPacker, TextPacker, TokenPacker
from jaxpaged.engine.executables import ExecutableStore, default_cache_dir, programs_identity
from jaxpaged.engine.factory import model_dtype
from jaxpaged.engine.pooling.engine import PoolingEngine
from jaxpaged.engine.pooling.inputs import PoolingInputs
from jaxpaged.engine.pooling.model_files import PoolingFiles, open_pooling_files
from jaxpaged.engine.pooling.programs import PoolingPrograms
from jaxpaged.engine.texts import tokenizer_for
from jaxpaged.metrics import EngineMetrics
from jaxpaged.models.decoder import init_device_state
from jaxpaged.weights.encoder import load_encoder
from jaxpaged.weights.loader import open_model

log = logging.getLogger(__name__)

CPU_TOKENS, GPU_TOKENS = 512, 8192  # a step


@dataclass(frozen=True)
class PoolingParts:
    """A running embedding engine and what its callers need beside it."""

    engine: PoolingEngine
    inputs: PoolingInputs
    model: PoolingModel
    config: EngineConfig


def build_pooling_engine(config: EngineConfig, *, warm: bool = False) -> PoolingParts:
    """Load the model and prepare its programs; with `warm`, compile all of them now.

    Raises:
        ConfigError, WeightsError: nothing was started; the text says what to change.
    """
    start = time.monotonic()
    # it needs little beside the weights, and another engine may share the device
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = jax.default_backend()
    dtype = model_dtype(config.model.dtype, platform)
    files = open_pooling_files(config.model)
    graphdef, params = _load(files, config, dtype)
    budget = config.scheduler.max_num_batched_tokens
    budget = budget or (CPU_TOKENS if platform == "cpu" else GPU_TOKENS)
    packer, state = _packer_and_state(files, budget, config.cache.page_size, dtype)
    store = _store(config, files, params, state)
    programs = PoolingPrograms(graphdef, files.model, params, state, packer, store)
    if warm or config.compile.warmup == "all":
        programs.warm_up()
    names = config.model.served_model_name or (config.model.model,)
    metrics = EngineMetrics(names[0], files.model.max_len)
    engine = PoolingEngine(programs, params, state, packer, metrics, files.model.size)
    inputs = PoolingInputs(tokenizer_for(config.model, files.path), files.model)
    log.info("%s is ready to embed after %.1f s", names[0], time.monotonic() - start)
    return PoolingParts(engine, inputs, files.model, config)


def _load(
    files: PoolingFiles, config: EngineConfig, dtype: np.dtype
) -> tuple[nnx.GraphDef, Params]:
    given = config.model
    if isinstance(files.config, EncoderConfig):
        is_dummy = given.load_format == "dummy"
        loaded = load_encoder(
            files.path, files.hf_config, dtype=dtype, is_dummy=is_dummy, seed=given.seed
        )
        return loaded.graphdef, loaded.params
    opened = open_model(
        files.path, dtype=dtype, load_format=given.load_format, hf_overrides=files.hf_config
    )
    loaded = opened.load(given.seed)
    return loaded.graphdef, loaded.params


def _packer_and_state(
    files: PoolingFiles, budget: int, page_size: int, dtype: np.dtype
) -> tuple[TextPacker, Any]:
    if not isinstance(files.config, ModelConfig):
        return RowPacker(files.model.max_len, budget), {}
    packer = TokenPacker(files.model.max_len, min(budget, files.model.max_len), page_size)
    # nothing is sampled here, so that the counts of tokens are as small as they can be
    config = dataclasses.replace(files.config, vocab=1)
    state = jax.jit(lambda: init_device_state(config, packer.num_pages, page_size, 0, dtype))()
    return packer, state


def _store(
    config: EngineConfig, files: PoolingFiles, params: Params, state: Mapping[str, Any]
) -> ExecutableStore:
    folder = config.compile.compile_cache_dir
    identity = programs_identity((files.config, files.model), params, state)
    is_kept = folder != ""
    return ExecutableStore(Path(folder or default_cache_dir()) if is_kept else None, identity)
