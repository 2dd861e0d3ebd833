"""What a family of models is to us: a translation of its configuration and a table of names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxpaged.config.architecture import EncoderConfig, ModelConfig
from jaxpaged.errors import ConfigError
from jaxpaged.models.fields import Fields
from jaxpaged.models.rope_fields import LAYER_TYPES

type Part = Literal["whole", "q", "k", "v", "gate", "up"]

AXES: dict[str, tuple[Callable[[Any], int], str]] = {
    "vocab": (lambda c: c.vocab, "vocab_size"),
    "embed": (lambda c: c.embed, "hidden_size"),
    "ffn": (lambda c: c.ffn, "intermediate_size"),
    "q_rows": (lambda c: c.heads * c.head_dim, "num_attention_heads x head_dim"),
    "kv_rows": (lambda c: c.kv_heads * c.head_dim, "num_key_value_heads x head_dim"),
    "head_dim": (lambda c: c.head_dim, "head_dim"),
    "positions": (lambda c: c.max_len, "max_position_embeddings"),  # this and the rest: encoders'
    "token_types": (lambda c: c.token_types, "type_vocab_size"),
    "labels": (lambda c: c.num_labels, "id2label"),
}
"""Axes of checkpoint tensors: their size, and the configuration fields that it comes from."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor goes: a weight of the model, or a part of a fused one."""

    path: str  # in the nested weights, with dots
    axes: tuple[str, ...]  # of the checkpoint's tensor, words of AXES
    part: Part = "whole"

    def shape(self, config: ModelConfig | EncoderConfig) -> tuple[int, ...]:
        return tuple(AXES[axis][0](config) for axis in self.axes)


@dataclass(frozen=True)
class Family:
    """One row of the registry. `norms` maps a layer's norm names to our own."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    translate: Callable[[Fields], ModelConfig]
    norms: Mapping[str, str]


PRE_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}


def weight_names(family: Family, config: ModelConfig) -> dict[str, Place]:
    """Every tensor that a checkpoint of this model must hold, by its name there."""
    names = {
        "model.embed_tokens.weight": Place("embedding.table", ("vocab", "embed")),
        "model.norm.weight": Place("norm.scale", ("embed",)),
    }
    if not config.tied_embeddings:
        names["lm_head.weight"] = Place("lm_head.table", ("vocab", "embed"))
    layer = _layer_names(family, config)
    for index in range(config.num_layers):
        for name, place in layer.items():
            path = f"layers.{index}.{place.path}"
            names[f"model.layers.{index}.{name}"] = Place(path, place.axes, place.part)
    return names


def _layer_names(family: Family, config: ModelConfig) -> dict[str, Place]:
    names = {
        "self_attn.q_proj.weight": Place("attention.qkv", ("q_rows", "embed"), "q"),
        "self_attn.k_proj.weight": Place("attention.qkv", ("kv_rows", "embed"), "k"),
        "self_attn.v_proj.weight": Place("attention.qkv", ("kv_rows", "embed"), "v"),
        "self_attn.o_proj.weight": Place("attention.out", ("embed", "q_rows")),
        "mlp.gate_proj.weight": Place("feed_forward.gate_up", ("ffn", "embed"), "gate"),
        "mlp.up_proj.weight": Place("feed_forward.gate_up", ("ffn", "embed"), "up"),
        "mlp.down_proj.weight": Place("feed_forward.down", ("embed", "ffn")),
    }
    for theirs, ours in family.norms.items():
        names[f"{theirs}.weight"] = Place(f"{ours}.scale", ("embed",))
    if config.qkv_bias:
        names["self_attn.q_proj.bias"] = Place("attention.qkv_bias", ("q_rows",), "q")
        names["self_attn.k_proj.bias"] = Place("attention.qkv_bias", ("kv_rows",), "k")
        names["self_attn.v_proj.bias"] = Place("attention.qkv_bias", ("kv_rows",), "v")
    if config.output_bias:
        names["self_attn.o_proj.bias"] = Place("attention.out_bias", ("embed",))
    if config.mlp_bias:
        names["mlp.gate_proj.bias"] = Place("feed_forward.gate_up_bias", ("ffn",), "gate")
        names["mlp.up_proj.bias"] = Place("feed_forward.gate_up_bias", ("ffn",), "up")
        names["mlp.down_proj.bias"] = Place("feed_forward.down_bias", ("embed",))
    if config.qk_norm:
        names["self_attn.q_norm.weight"] = Place("attention.q_norm.scale", ("head_dim",))
        names["self_attn.k_norm.weight"] = Place("attention.k_norm.scale", ("head_dim",))
    return names


@dataclass(frozen=True)
class Sizes:
    """The fields that every family spells alike."""

    vocab: int
    embed: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    num_layers: int


def read_sizes(fields: Fields, *, head_dim: int | None) -> Sizes:
    """Read the model's sizes. `head_dim` applies when the file names none; None derives it."""
    embed = fields.count("hidden_size", most=2**20)
    heads = fields.count("num_attention_heads", most=4096)
    kv_heads = fields.count("num_key_value_heads", heads, most=4096)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads, {heads}")
    derived = head_dim or embed // heads
    if head_dim is None and fields.get("head_dim") is None and embed % heads:
        fields.refuse("hidden_size", f"num_attention_heads, {heads}, must divide it")
    head_dim = int(fields.count("head_dim", derived, most=4096))
    if head_dim % 2 or head_dim == 0:
        raise ConfigError(
            f"{fields.source}: head_dim is {head_dim}: it must be even, its halves are rotated"
        )
    return Sizes(
        vocab=fields.count("vocab_size"),
        embed=embed,
        ffn=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_layers=fields.count("num_hidden_layers", most=4096),
    )


def read_windows(fields: Fields, num_layers: int, derived: list[bool]) -> list[int | None]:
    """Window of every layer, from `layer_types`, or else from `derived` (True: slides)."""
    types, known = fields.get("layer_types"), ", ".join(LAYER_TYPES)
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            fields.refuse("layer_types", f"it needs one entry for each of the {num_layers} layers")
        for entry in types:
            if entry not in LAYER_TYPES:
                fields.refuse("layer_types", f"{entry!r} is not served, known are {known}")
        derived = [entry == LAYER_TYPES[1] for entry in types]
    if not any(derived):
        return [None] * num_layers
    window = fields.count("sliding_window")
    return [window if slides else None for slides in derived]
