"""Llama 2 and 3, and what shares their shape, such as SmolLM2."""

from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.models.family import PRE_NORMS, Family, read_sizes
from jaxpaged.models.fields import Fields
from jaxpaged.models.rope_fields import extended_len, read_rope


def translate(fields: Fields, head_dim: int | None = None) -> ModelConfig:
    """Read a Llama configuration; every layer sees everything.

    `head_dim` applies where the file names none; None derives it.
    """
    sizes = read_sizes(fields, head_dim=head_dim)
    rope = read_rope(fields, theta=10_000.0)
    has_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab=sizes.vocab,
        embed=sizes.embed,
        ffn=sizes.ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        layer_kinds=(LayerKind(None, rope),) * sizes.num_layers,
        max_len=extended_len(fields, rope),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), ("llama",), translate, PRE_NORMS)
