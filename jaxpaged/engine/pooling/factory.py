"""Puts an embedding engine together from its configuration."""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import EncoderConfig
from jaxpaged.config.pooling import PoolingModel
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.capacity import tree_bytes
from jaxpaged.engine.devices import use_devices
from jaxpaged.engine.executables import ExecutableStore, default_cache_dir, programs_identity
from jaxpaged.engine.memory import limit_device_memory, present_device
from jaxpaged.engine.opening import model_dtype
from jaxpaged.engine.pooling.engine import PoolingEngine
from jaxpaged.engine.pooling.inputs import PoolingInputs
from jaxpaged.engine.pooling.memory import beside_weights, make_packer, state_shapes
from jaxpaged.engine.pooling.model_files import PoolingFiles, open_pooling_files
from jaxpaged.engine.pooling.programs import PoolingPrograms
from jaxpaged.engine.texts import tokenizer_for
from jaxpaged.metrics import EngineMetrics
from jaxpaged.models.decoder import empty_like
from jaxpaged.weights.encoder import load_encoder
from jaxpaged.weights.loader import open_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolingParts:
    """A running embedding engine and what its callers need beside it."""

    engine: PoolingEngine
    inputs: PoolingInputs
    model: PoolingModel
    config: EngineConfig
    device_share: float  # of a GPU's memory, for another engine to leave it; of a CPU's 0


def build_pooling_engine(config: EngineConfig, *, warm: bool = False) -> PoolingParts:
    """Load the model and prepare its programs; with `warm`, compile all of them now.

    Raises:
        ConfigError, WeightsError: nothing was started; the text says what to change.
    """
    start = time.monotonic()
    # it needs little beside the weights, and another engine may share the device
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    limit_device_memory(config.cache.gpu_memory_utilization)
    use_devices(config.parallel)
    platform = jax.default_backend()
    dtype = model_dtype(config.model.dtype, platform)
    files = open_pooling_files(config.model)
    page_size = config.cache.page_size
    packer = make_packer(files, config, is_cpu=platform == "cpu")
    graphdef, params = _load(files, config, dtype)
    shapes = state_shapes(files, packer, page_size, dtype)
    state = empty_like(shapes)
    store = _store(config, files, params, state)
    programs = PoolingPrograms(graphdef, files.model, params, state, packer, store)
    if warm or config.compile.warmup == "all":
        programs.warm_up()
    names = config.model.served_model_name or (config.model.model,)
    metrics = EngineMetrics(names[0], files.model.max_len)
    engine = PoolingEngine(programs, params, state, packer, metrics, files.model.size)
    inputs = PoolingInputs(tokenizer_for(config.model, files.path), files.model)
    log.info("%s is ready to embed after %.1f s", names[0], time.monotonic() - start)
    share = _share(tree_bytes(params) + beside_weights(files, packer, page_size, dtype), config)
    return PoolingParts(engine, inputs, files.model, config, share)


def _share(num_bytes: int, config: EngineConfig) -> float:
    device = present_device(config)
    return 0.0 if device.is_cpu else num_bytes / device.total_bytes


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


def _store(
    config: EngineConfig, files: PoolingFiles, params: Params, state: Any
) -> ExecutableStore:
    folder = config.compile.compile_cache_dir
    identity = programs_identity((files.config, files.model), params, state)
    if folder is None:
        return ExecutableStore(default_cache_dir(), identity)
    return ExecutableStore(Path(folder) if folder else None, identity)
