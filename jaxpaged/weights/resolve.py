"""From what the operator typed to files on this disk."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub

from jaxpaged.config.files import read_json
from jaxpaged.errors import ConfigError, WeightsError
from jaxpaged.weights.manifest import MANIFEST, WEIGHTS
from jaxpaged.weights.safetensors import INDEX, SINGLE
from jaxpaged.weights.source import clip

type LoadFormat = Literal["auto", "orbax", "safetensors", "gguf", "dummy"]
type Kind = Literal["orbax", "safetensors", "gguf"]

SMALL_FILES = ("*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja")
IGNORED_FILES = ("original/*", "consolidated*")
KINDS: dict[Kind, str] = {
    "orbax": "an Orbax checkpoint",
    "safetensors": "no GGUF file and no Orbax checkpoint",
    "gguf": "GGUF",
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Checkpoint:
    """`path` is a folder with config.json, or a GGUF file."""

    path: Path
    kind: Kind


def find_checkpoint(
    path_or_id: str | Path,
    load_format: LoadFormat,
    revision: str | None,
    download_dir: str | None = None,
) -> Checkpoint:
    """Find a folder or a GGUF file, or fetch a model from the hub.

    Only safetensors, configuration and tokenizer files are fetched, to the hub's own cache where no
    `download_dir` is given.

    Raises:
        ConfigError: there is no such thing, or the hub cannot be asked.
        WeightsError: the weights there are in no format that is read.
    """
    path = Path(path_or_id)
    if not path.exists():
        path = _fetch(str(path_or_id), load_format, revision, download_dir)
    checkpoint = _identify(path)
    if load_format not in ("auto", "dummy", checkpoint.kind):
        said = f"load_format is {load_format}, {path.name} is {KINDS[checkpoint.kind]}"
        raise ConfigError(clip(f"{said}: leave it at auto"))
    if load_format != "dummy" and checkpoint.kind == "safetensors":
        _check_weights(checkpoint.path)
    return checkpoint


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, refusing one that needs code of its own."""
    path, label = folder / "config.json", f"config.json of {folder.name}"
    try:
        config = read_json(path)
    except ConfigError as error:
        raise ConfigError(clip(f"{folder.name}: {error}")) from None
    if not isinstance(config, dict):
        raise ConfigError(clip(f"{label} is no mapping"))
    if config.get("auto_map"):
        raise ConfigError(clip(f"{label} has an auto_map: code of a model folder is never run"))
    if config.get("quantization_config"):
        raise ConfigError(
            clip(f"{label} has a quantization_config: of quantised weights only GGUF is served")
        )
    return config


def _identify(path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                clip(f"{path.name} is a file: name a folder with config.json, or a .gguf file")
            )
        return Checkpoint(path, "gguf")
    if (path / "config.json").is_file():
        return Checkpoint(path, "orbax" if (path / MANIFEST).is_file() else "safetensors")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Checkpoint(ggufs[0], "gguf")
    if ggufs:
        raise ConfigError(clip(f"{path.name} holds {len(ggufs)} GGUF files: name one of them"))
    raise ConfigError(
        clip(f"{path.name} has no config.json and no .gguf file: it is no model folder")
    )


def _check_weights(folder: Path) -> None:
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise WeightsError(
            clip(
                f"{folder.name} has only pickled weights ({pickles[0]}), which are never opened: "
                "convert them to safetensors"
            )
        )
    if (folder / WEIGHTS).is_dir():
        problem = f"{folder.name} has Orbax weights and no {MANIFEST}, which is written last"
        raise WeightsError(clip(f"{problem}: convert the model again"))
    raise WeightsError(clip(f"{folder.name} has neither {SINGLE} nor {INDEX}"))


def _fetch(
    model_id: str, load_format: LoadFormat, revision: str | None, download_dir: str | None
) -> Path:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_id) or model_id.startswith("."):
        raise ConfigError(
            clip(f"{model_id} does not exist: name a folder, a .gguf file or a hub id")
        )
    weights = () if load_format == "dummy" else ("*.safetensors",)
    try:
        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*SMALL_FILES, *weights],
            ignore_patterns=list(IGNORED_FILES),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            clip(
                f"{model_id} is no folder here and could not be fetched from the hub "
                f"({type(error).__name__}): check the name, the network and HF_TOKEN"
            )
        ) from error
    return Path(folder)
