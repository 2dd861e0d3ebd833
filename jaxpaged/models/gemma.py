"""Gemma 2 and 3: four norms a layer, scaled embeddings, local and global layers."""

from dataclasses import replace

from jaxpaged.config.architecture import LayerKind, ModelConfig, RopeConfig
from jaxpaged.models.family import Family, read_sizes, read_windows
from jaxpaged.models.fields import Fields
from jaxpaged.models.rope_fields import read_rope

NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "feed_forward_post_norm",
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def translate_gemma2(fields: Fields) -> ModelConfig:
    """Read a Gemma 2 configuration: every other layer is local, all with one rotation."""
    config = _translate(fields, local_every=2)
    rope = read_rope(fields, theta=10_000.0)
    return replace(
        config,
        family="gemma2",
        layer_kinds=tuple(LayerKind(kind.window, rope) for kind in config.layer_kinds),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
    )


def translate_gemma3(fields: Fields) -> ModelConfig:
    """Read a Gemma 3 text configuration: five local layers to a global one, rotated differently."""
    if fields.get("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", "only causal models are served")
    config = _translate(fields, local_every=fields.count("sliding_window_pattern", 6))
    return replace(
        config,
        family="gemma3",
        qk_norm=True,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", None),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
    )


def _translate(fields: Fields, *, local_every: int) -> ModelConfig:
    sizes = read_sizes(fields, head_dim=256)
    derived = [(index + 1) % local_every != 0 for index in range(sizes.num_layers)]
    windows = read_windows(fields, sizes.num_layers, derived)
    everywhere = read_rope(fields, theta=GLOBAL_THETA)
    nearby = _local_rope(fields)
    has_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family="gemma",
        vocab=sizes.vocab,
        embed=sizes.embed,
        ffn=sizes.ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        layer_kinds=tuple(LayerKind(w, nearby if w else everywhere) for w in windows),
        max_len=fields.count("max_position_embeddings", 8192),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        post_norms=True,
        norm_plus_one=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embed_scale=sizes.embed**0.5,
    )


def _local_rope(fields: Fields) -> RopeConfig:
    """The rotation of local layers, which has its own base and no scaling in the old spelling."""
    new = fields.get("rope_parameters")
    theta = fields.number("rope_local_base_freq", LOCAL_THETA)
    if isinstance(new, dict) and "sliding_attention" in new:
        # without the file's rope_theta, which is the global layers'
        kept = ("rope_parameters", "max_position_embeddings")
        values = {name: fields.get(name) for name in kept}
        return read_rope(Fields(values, fields.source), theta=theta, layer_type="sliding_attention")
    return RopeConfig(theta)


def _soft_cap(fields: Fields, name: str, default: float | None) -> float | None:
    # null switches the cap off; only a missing field takes the default
    return fields.number(name, None if name in fields.values else default)


GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), ("gemma2",), translate_gemma2, NORMS)
GEMMA3 = Family("gemma3", ("Gemma3ForCausalLM",), ("gemma3_text",), translate_gemma3, NORMS)
