"""What a configuration names, opened: the model's files, its type, the sizes of steps.

The engine needs it, and so do the processes that lower for it, which load nothing else of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.buckets import BucketLadder, default_ladder
from jaxpaged.engine.drafting import open_draft
from jaxpaged.layers.attention import AttentionOp, paged_attention
from jaxpaged.sharding import Placement
from jaxpaged.weights.loader import ModelFiles, open_model


def open_files(
    config: EngineConfig,
    dtype: np.dtype,
    attention: AttentionOp | None = None,
    placement: Placement | None = None,
) -> ModelFiles:
    """The configured model and its draft model, of which only the configuration is read."""
    files = open_model(
        config.model.model,
        dtype=dtype,
        load_format=config.model.load_format,
        hf_overrides=config.model.hf_overrides,
        revision=config.model.revision,
        download_dir=config.model.download_dir,
        attend=attention or paged_attention,
        placement=placement,
    )
    draft = open_draft(config, files.config, dtype, placement)
    return dataclasses.replace(files, draft=draft)


def model_dtype(name: str, platform: str) -> np.dtype:
    """The type of weights, activations and KV."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def ladder_of(config: EngineConfig) -> BucketLadder:
    """The buckets of an engine whose sizes are settled."""
    sched = config.scheduler
    assert sched.max_num_seqs is not None
    assert sched.max_num_batched_tokens is not None
    return default_ladder(
        "cpu" if jax.default_backend() == "cpu" else "gpu",
        sched.max_num_seqs,
        sched.max_num_batched_tokens,
        config.compile.batch_buckets,
        config.compile.token_buckets,
        sched.speculation,
    )
