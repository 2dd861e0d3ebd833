"""The shape of a model: what a family's own configuration file is translated into."""

from dataclasses import dataclass
from typing import Literal

type RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
type Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    `kind` and the fields after it follow Hugging Face's `rope_parameters`; those that a kind does
    not use keep their neutral value. Lengths are in tokens.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LayerKind:
    """What may differ between the layers of one model; equal kinds share one traced layer."""

    window: int | None  # tokens that a query sees, itself included; None sees all
    rope: RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder's shape and switches, independent of the family it came from.

    Field names are the dimension words of the glossary. `layer_kinds` has one entry a layer.
    """

    family: str
    vocab: int  # rows of the embedding
    embed: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_kinds: tuple[LayerKind, ...]
    max_len: int  # longest sequence in tokens that the positions support
    norm_eps: float
    activation: Activation = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over head_dim on q and k before the rotation
    post_norms: bool = False  # Gemma: norms after attention and after the feed-forward too
    norm_plus_one: bool = False  # the checkpoint stores weight - 1 (Gemma's safetensors)
    attention_scale: float | None = None  # None means head_dim ** -0.5
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    attention_sinks: bool = False
    vocab_padding: int = 0  # rows of `vocab` at its end that are no token's, in a layout

    @property
    def local_window(self) -> int | None:
        """What layers with a window see at most; None where that is no less than the context."""
        widest = max((kind.window or 0 for kind in self.layer_kinds), default=0)
        return widest if 0 < widest < self.max_len else None

    @property
    def num_local_layers(self) -> int:
        """Layers whose pages go back when the window has passed them."""
        is_local = self.local_window is not None
        return sum(kind.window is not None for kind in self.layer_kinds) if is_local else 0

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def scale(self) -> float:
        """The factor on q . k, before soft cap and softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


@dataclass(frozen=True)
class EncoderConfig:
    """A BERT-type encoder's shape: every token sees its whole text, positions are learnt.

    With `num_labels` it has BERT's pooler and a classifier behind it, else neither.
    """

    family: str
    vocab: int
    embed: int
    ffn: int
    heads: int
    num_layers: int
    max_len: int  # rows of the table of positions
    token_types: int
    norm_eps: float
    activation: Activation = "gelu"
    num_labels: int = 0

    tied_embeddings = False  # what the loader asks of every kind of model

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads
