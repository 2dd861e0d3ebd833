"""Tiny models that embed: the golden cases of tests/golden/pooling.json as folders."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.checkpoints import GOLDEN, tiny_weight, write_checkpoint

CASES = json.loads((GOLDEN / "pooling.json").read_text())
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]


def golden(name: str) -> np.ndarray:
    return np.load(GOLDEN / "pooling.npz")[name]


def of_length_1(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def write_tiny(name: str, folder: Path, *, pooling: str = "", normalize: bool = True) -> Path:
    """A golden case with a tokenizer; with `pooling`, also sentence-transformers' files."""
    case = CASES[name]
    tensors = {key: tiny_weight(key, tuple(shape)) for key, shape in case["shapes"].items()}
    write_checkpoint(folder, case["config"], tensors)
    write_tokenizer(folder)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    entries = [{"type": f"sentence_transformers.models.{m}", "path": m} for m in modules]
    if pooling:
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "Pooling").mkdir()
        chosen = {f"pooling_mode_{pooling}": True}
        (folder / "Pooling" / "config.json").write_text(json.dumps(chosen))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Letters as words between [CLS] and [SEP]; like MiniLM's it says to pad and to cut."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(16)
    tokenizer.save(str(folder / "tokenizer.json"))
