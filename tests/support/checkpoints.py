"""Tiny random checkpoints of every family, the ones that tests/golden has logits of."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxpaged.models.family import weight_names
from jaxpaged.models.registry import find_family, model_config

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_cases() -> dict[str, dict[str, Any]]:
    """Name of a case to its `config`, `shapes` of the weights and `token_ids`."""
    cases = json.loads((GOLDEN / "families.json").read_text())
    cases.pop("made_with")
    return cases


def golden_logits(name: str) -> NDArray[np.float32]:
    return np.load(GOLDEN / "families.npz")[name]


def tiny_weight(
    name: str, shape: tuple[int, ...], *, norms_near_zero: bool = False
) -> NDArray[np.float32]:
    """The twin of the function in benchmarks/golden/make_golden.py."""
    unit = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32) - 0.5
    if "norm" in name:
        return unit * np.float32(0.4) + np.float32(0.0 if norms_near_zero else 1.0)
    return unit * np.float32(3.0 / np.sqrt(shape[-1]))


def tiny_tensors(case: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    near_zero = case["config"]["model_type"].startswith("gemma")
    return {
        name: tiny_weight(name, tuple(shape), norms_near_zero=near_zero)
        for name, shape in case["shapes"].items()
    }


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]]
) -> Path:
    """A folder with config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_variant(name: str, folder: Path, **changes: Any) -> Path:
    """A golden case with other sizes, its weights made for these; there are no logits of it."""
    hf_config = golden_cases()[name]["config"] | changes
    model = model_config(hf_config, name)
    near_zero = hf_config["model_type"].startswith("gemma")
    tensors = {
        weight: tiny_weight(weight, place.shape(model), norms_near_zero=near_zero)
        for weight, place in weight_names(find_family(hf_config, name), model).items()
    }
    return write_checkpoint(folder, hf_config, tensors)
