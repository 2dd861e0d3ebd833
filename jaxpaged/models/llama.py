"""Llama 2 and 3, and what shares their shape, such as SmolLM2."""

import dataclasses

from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.models.family import PRE_NORMS, Family, read_sizes
from jaxpaged.models.fields import Fields
from jaxpaged.models.rope_fields import extended_len, read_rope


def translate(fields: Fields) -> ModelConfig:
    """Read a Llama configuration; every layer sees everything."""
    sizes = read_sizes(fields)
    rope = read_rope(fields, theta=10_000.0)
    has_bias = fields.flag("attention_bias", False)
    shape = dataclasses.asdict(sizes)
    num_layers = shape.pop("num_layers")
    return ModelConfig(
        family="llama",
        **shape,
        layer_kinds=(LayerKind(None, rope),) * num_layers,
        max_len=extended_len(fields, rope),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), ("llama",), translate, PRE_NORMS)
