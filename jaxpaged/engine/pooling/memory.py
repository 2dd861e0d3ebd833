"""What an embedding model takes of a device, known before a weight is read."""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

from jaxpaged.config.architecture import EncoderConfig, ModelConfig
from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.pooling import RowBucket, RowPacker, TextPacker, TokenPacker
from jaxpaged.engine.capacity import tree_bytes
from jaxpaged.engine.memory import GIB, DeviceMemory
from jaxpaged.engine.pooling.model_files import PoolingFiles, open_pooling_files
from jaxpaged.engine.workspace import LIBRARY_BYTES, workspace_bytes
from jaxpaged.errors import ConfigError
from jaxpaged.models.decoder import device_state_shapes
from jaxpaged.models.encoder import Encoder
from jaxpaged.weights.loader import open_model

CPU_TOKENS, GPU_TOKENS = 512, 8192  # a step
PROCESS_BYTES = GIB  # the driver's part of one more process, and holes between allocations


def planned_bytes(config: EngineConfig, dtype: np.dtype, device: DeviceMemory) -> int:
    """All that the process of an embedding model takes of a GPU; of a CPU nothing is planned."""
    if device.is_cpu:
        return 0
    given = dataclasses.replace(config.model, load_format="dummy")  # of a hub model no weights
    files = open_pooling_files(given)
    packer = make_packer(files, config, is_cpu=False)
    weights = tree_bytes(_abstract_params(files, dtype))
    return weights + beside_weights(files, packer, config.cache.page_size, dtype)


def beside_weights(files: PoolingFiles, packer: TextPacker, page_size: int, dtype: np.dtype) -> int:
    """Pages and the largest step, and what a process costs."""
    state = tree_bytes(state_shapes(files, packer, page_size, dtype))
    return state + _workspace_bytes(files, packer, dtype) + PROCESS_BYTES


def make_packer(files: PoolingFiles, config: EngineConfig, *, is_cpu: bool) -> TextPacker:
    """What makes steps of texts, sized as the operator says.

    Raises:
        ConfigError: the settings want several devices.
    """
    if config.parallel.num_devices > 1:
        raise ConfigError(
            f"{files.path.name} embeds, and that on one device, but --tensor-parallel-size and "
            f"--pipeline-parallel-size ask for {config.parallel.num_devices}: leave them out"
        )
    longest = files.model.max_len
    budget = config.scheduler.max_num_batched_tokens or (CPU_TOKENS if is_cpu else GPU_TOKENS)
    if isinstance(files.config, EncoderConfig):
        return RowPacker(longest, budget)
    return TokenPacker(longest, min(budget, longest), config.cache.page_size)


def state_shapes(files: PoolingFiles, packer: TextPacker, page_size: int, dtype: np.dtype) -> Any:
    """The pages that a decoder's steps need; an encoder has no state."""
    if not isinstance(packer, TokenPacker):
        return {}
    return device_state_shapes(_headless(files), packer.num_pages, page_size, 0, dtype)


def _headless(files: PoolingFiles) -> ModelConfig:
    """Nothing is sampled, so that counts of tokens and logits are as small as they can be."""
    assert isinstance(files.config, ModelConfig)
    return dataclasses.replace(files.config, vocab=1)


def _workspace_bytes(files: PoolingFiles, packer: TextPacker, dtype: np.dtype) -> int:
    if isinstance(packer, TokenPacker):
        return workspace_bytes(_headless(files), dtype, packer.buckets[-1].num_tokens, 1)
    assert isinstance(files.config, EncoderConfig)
    sizes = [_encoder_bytes(files.config, bucket, dtype.itemsize) for bucket in packer.buckets]
    return max(sizes) + LIBRARY_BYTES


def _encoder_bytes(model: EncoderConfig, bucket: RowBucket, itemsize: int) -> int:
    """Scores of a layer as logits and as weights, beside its activations."""
    tokens = bucket.rows * bucket.row_len
    scores = tokens * bucket.row_len * model.heads * (4 + 4 + itemsize)
    return scores + tokens * itemsize * (6 * model.embed + 2 * model.ffn)


def _abstract_params(files: PoolingFiles, dtype: np.dtype) -> Any:
    config = files.config
    if isinstance(config, EncoderConfig):
        model = nnx.eval_shape(lambda: Encoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
        return nnx.to_pure_dict(nnx.split(model)[1])
    opened = open_model(files.path, dtype=dtype, load_format="dummy", hf_overrides=files.hf_config)
    return opened.params
