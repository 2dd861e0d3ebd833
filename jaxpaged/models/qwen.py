"""Qwen 2 and 2.5 (biased projections) and Qwen 3 (normed queries and keys)."""

from dataclasses import replace

from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.models import llama
from jaxpaged.models.family import PRE_NORMS, Family, read_windows
from jaxpaged.models.fields import Fields

QWEN3_HEAD_DIM = 128


def translate_qwen2(fields: Fields) -> ModelConfig:
    """Read a Qwen 2 configuration: q, k and v have a bias, whatever it says."""
    config = llama.translate(fields)
    config = replace(config, family="qwen2", qkv_bias=True, output_bias=False)
    return _with_windows(config, fields)


def translate_qwen3(fields: Fields) -> ModelConfig:
    """Read a Qwen 3 configuration."""
    config = llama.translate(fields, head_dim=QWEN3_HEAD_DIM)
    return _with_windows(replace(config, family="qwen3", qk_norm=True), fields)


def _with_windows(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Give layers their window: none unless `use_sliding_window`, and then the upper ones."""
    if not fields.flag("use_sliding_window", False):
        return config
    first = fields.count("max_window_layers", 28, least=0)
    derived = [index >= first for index in range(config.num_layers)]
    windows = read_windows(fields, config.num_layers, derived)
    rope = config.layer_kinds[0].rope
    return replace(config, layer_kinds=tuple(LayerKind(window, rope) for window in windows))


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), translate_qwen2, PRE_NORMS)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), translate_qwen3, PRE_NORMS)
