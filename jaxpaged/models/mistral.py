"""Mistral: Llama's shape with a window on every layer."""

from dataclasses import replace

from jaxpaged.config.architecture import LayerKind, ModelConfig
from jaxpaged.models import llama
from jaxpaged.models.family import PRE_NORMS, Family
from jaxpaged.models.fields import Fields


def translate(fields: Fields) -> ModelConfig:
    """Read a Mistral configuration: a missing window is 4096, one of null is none."""
    config = llama.translate(fields)
    has_window = fields.get("sliding_window") is not None or "sliding_window" not in fields.values
    window = fields.count("sliding_window", 4096) if has_window else None
    kinds = tuple(LayerKind(window, kind.rope) for kind in config.layer_kinds)
    return replace(config, family="mistral", layer_kinds=kinds)


FAMILY = Family("mistral", ("MistralForCausalLM",), ("mistral",), translate, PRE_NORMS)
