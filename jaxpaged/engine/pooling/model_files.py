"""What a model folder says about embedding: its configuration, and sentence-transformers' files.

`modules.json` lists what follows the model; pooling has a folder with its configuration. Read by
the server's front too, which knows no device.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxpaged.config.architecture import EncoderConfig, ModelConfig
from jaxpaged.config.files import read_json, read_object
from jaxpaged.config.pooling import PoolingKind, PoolingModel
from jaxpaged.config.settings import ModelSettings
from jaxpaged.errors import ConfigError
from jaxpaged.models import bert
from jaxpaged.models.fields import Fields
from jaxpaged.models.registry import model_config
from jaxpaged.weights.resolve import KINDS, Checkpoint, find_checkpoint, read_config
from jaxpaged.weights.source import merged

MODULES = "modules.json"
_KINDS: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True)
class PoolingFiles:
    """A model that embeds, of which no weight was read."""

    path: Path
    hf_config: dict[str, Any]  # with the overrides put in
    config: ModelConfig | EncoderConfig
    model: PoolingModel


def resolved_runner(settings: ModelSettings) -> Literal["generate", "pooling"]:
    """What a model is served for: what the operator says, or else what its files do.

    Raises:
        ConfigError, WeightsError: there is no such model.
    """
    if settings.runner != "auto":
        return settings.runner
    checkpoint = _found(settings)
    if checkpoint.kind != "safetensors":
        return "generate"
    hf_config = merged(read_config(checkpoint.path), settings.hf_overrides)
    embeds = bert.is_encoder(hf_config) or (checkpoint.path / MODULES).is_file()
    return "pooling" if embeds else "generate"


def _found(settings: ModelSettings) -> Checkpoint:
    place = settings.revision, settings.download_dir
    return find_checkpoint(settings.model, settings.load_format, *place)


def open_pooling_files(settings: ModelSettings) -> PoolingFiles:
    """Find the model and read what it is.

    Raises:
        ConfigError: it cannot be served for embedding.
        WeightsError: its weights are in no format that is read.
    """
    checkpoint = _found(settings)
    path = checkpoint.path
    if checkpoint.kind != "safetensors":
        raise ConfigError(
            f"{path.name} is {KINDS[checkpoint.kind]}: to embed, a model must be a folder of "
            "safetensors"
        )
    read = read_config(path)
    hf_config = merged(merged(read, settings.hf_overrides), _without_head(read))
    if bert.is_encoder(hf_config):
        config = bert.translate(Fields(hf_config, path.name))
    else:
        config = model_config(hf_config, path.name)
    model = pooling_model(path, hf_config, config)
    longest = settings.max_model_len
    if longest is not None and longest != -1:
        if longest > config.max_len:
            raise ConfigError(
                f"max_model_len is {longest}, the positions of {path.name} end at {config.max_len}"
            )
        model = replace(model, max_len=longest)
    return PoolingFiles(path, hf_config, config, model)


def _without_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder that embeds has no use for its head, and is often stored without."""
    names = hf_config.get("architectures")
    if bert.is_encoder(hf_config) or not isinstance(names, list):
        return {}
    whole = [re.sub("Model$", "ForCausalLM", str(name)) for name in names]
    return {"architectures": whole, "tie_word_embeddings": True}


def pooling_model(
    path: Path, hf_config: Mapping[str, Any], config: ModelConfig | EncoderConfig
) -> PoolingModel:
    """What `path` holds. Without modules.json: a decoder's last token or an encoder's first.

    Raises:
        ConfigError: a module that is not served, or a file that makes no sense.
    """
    is_encoder = isinstance(config, EncoderConfig)
    labels = config.num_labels if is_encoder else 0
    dimensions = hf_config.get("matryoshka_dimensions") or ()
    model = PoolingModel(
        pooling="cls" if is_encoder else "last",
        normalize=True,
        vocab=config.vocab,
        size=labels or config.embed,
        max_len=config.max_len,
        is_encoder=is_encoder,
        classifies=labels > 0,
        sigmoid=not _is_identity(hf_config),
        is_matryoshka=bool(hf_config.get("is_matryoshka") or dimensions),
        dimensions=tuple(sorted(int(size) for size in dimensions)),
    )
    if labels or not (path / MODULES).is_file():
        return model
    return _with_modules(model, path)


def _with_modules(model: PoolingModel, path: Path) -> PoolingModel:
    kinds = {str(entry.get("type", "")).rpartition(".")[2]: entry for entry in _modules(path)}
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise ConfigError(
            f"{MODULES} of {path.name} names {', '.join(unknown)}, served are Transformer, Pooling "
            "and Normalize"
        )
    pooling = model.pooling
    if "Pooling" in kinds:
        pooling = _pooling(path / str(kinds["Pooling"].get("path", "1_Pooling")))
    if pooling != "last" and not model.is_encoder:
        raise ConfigError(f"{path.name} pools by {pooling}: of a decoder served is the last token")
    limit = read_object(path / "sentence_bert_config.json").get("max_seq_length")
    has_limit = isinstance(limit, int) and 0 < limit < model.max_len
    prompts = read_object(path / "config_sentence_transformers.json").get("prompts")
    return replace(
        model,
        pooling=pooling,
        normalize="Normalize" in kinds,
        max_len=limit if has_limit else model.max_len,
        prompts={
            str(name): str(text)
            for name, text in (prompts.items() if isinstance(prompts, dict) else ())
        },
    )


def _modules(path: Path) -> list[dict[str, Any]]:
    content = read_json(path / MODULES)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(f"{MODULES} of {path.name} is no list of modules")
    return content


def _pooling(folder: Path) -> PoolingKind:
    config = read_object(folder / "config.json")
    named = config.get("pooling_mode")
    if named is not None:
        found = [named]
    else:
        found = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
    kinds = _NAMES | _KINDS
    if len(found) != 1 or found[0] not in kinds:
        raise ConfigError(
            f"{folder.name}/config.json pools by {found}, served is one of {', '.join(_KINDS)}"
        )
    return kinds[found[0]]


def _is_identity(hf_config: Mapping[str, Any]) -> bool:
    section = hf_config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, Mapping) else None
    named = named or hf_config.get("sbert_ce_default_activation_function")
    return isinstance(named, str) and named.endswith(".Identity")
