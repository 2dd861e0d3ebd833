"""The smallest configuration with everything in it; tests change what they are about."""

from jaxpaged.config.architecture import LayerKind, ModelConfig, RopeConfig

TINY = ModelConfig(
    family="llama",
    vocab=11,
    embed=12,
    ffn=10,
    heads=4,
    kv_heads=2,
    head_dim=6,
    layer_kinds=(LayerKind(None, RopeConfig(100.0)),) * 2,
    max_len=32,
    norm_eps=1e-6,
)
