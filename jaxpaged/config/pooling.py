"""How a text becomes one vector: what sentence-transformers' files or the operator say of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
