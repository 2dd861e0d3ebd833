"""Which families there are, and the translation of a checkpoint's own configuration."""

from typing import Any

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.errors import ConfigError
from jaxpaged.models import gemma, llama, mistral, qwen
from jaxpaged.models.family import Family
from jaxpaged.models.fields import Fields

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
)


def model_config(hf_config: dict[str, Any], source: str) -> ModelConfig:
    """Translate a Hugging Face configuration; `source` names it in errors.

    Raises:
        ConfigError: an unknown architecture, or a field that is missing or makes no sense.
    """
    return find_family(hf_config, source).translate(Fields(hf_config, source))


def find_family(hf_config: dict[str, Any], source: str) -> Family:
    """Choose the family by `architectures`, or by `model_type` where those are missing."""
    architectures = hf_config.get("architectures")
    model_type = hf_config.get("model_type")
    names = architectures if isinstance(architectures, list) and architectures else []
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
        if not names and model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    shown = str(names[0] if names else model_type)[:60]
    raise ConfigError(f"{source}: architecture {shown} is not served, known are {known}")
