"""How a text becomes one vector: what sentence-transformers' files or the operator say of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxpaged.config.settings import EngineConfig
from jaxpaged.errors import ConfigError

LEAST_SHARE = 0.05  # of a device, under which no model that generates is worth starting

type PoolingKind = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class PoolingModel:
    """A model that gives vectors or scores, as those who ask for them need to know it."""

    pooling: PoolingKind  # over the hidden states of a text's tokens
    normalize: bool  # vectors have length 1
    vocab: int  # the bound of token ids
    size: int  # numbers a vector; of a classifier 1
    max_len: int  # longest text in tokens, special ones included
    is_encoder: bool
    classifies: bool  # scores pairs of texts by a head of its own and gives no vectors
    sigmoid: bool  # what the classifier's logit goes through before it is a score
    is_matryoshka: bool  # the first numbers of a vector are a vector too
    dimensions: tuple[int, ...]  # allowed lengths of a shortened vector; empty: all
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])  # prefixes by name


def share_devices(config: EngineConfig, embedding: EngineConfig) -> bool:
    """Whether the model that embeds has its device in common with the one that generates."""
    ours, parallel = embedding.parallel.device_ids or (0,), config.parallel
    theirs = parallel.device_ids or range(parallel.num_devices * parallel.data_parallel_size)
    return not set(ours).isdisjoint(theirs)


def leave_room(config: EngineConfig, share: float) -> EngineConfig:
    """The configuration with a share of each device left to the model that embeds.

    Raises:
        ConfigError: next to nothing would be left.
    """
    wanted = config.cache.gpu_memory_utilization
    left = wanted - share
    if left < LEAST_SHARE:
        raise ConfigError(
            f"the embedding model takes {share:.0%} of the GPU and --gpu-memory-utilization is "
            f'{wanted:g}: give it a GPU of its own by "device_ids" in --embedding-settings, or a '
            "smaller max_model_len or max_num_batched_tokens there"
        )
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=left))
