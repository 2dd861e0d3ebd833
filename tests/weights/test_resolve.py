import json
import pickle
import socket
from fnmatch import fnmatch

import jax.numpy as jnp
import pytest

from jaxpaged.errors import ConfigError, WeightsError
from jaxpaged.weights.loader import load_model
from jaxpaged.weights.resolve import find_checkpoint
from tests.support.checkpoints import golden_cases, tiny_tensors, write_checkpoint
from tests.weights.refusals import refusal

CASE = golden_cases()["llama"]


def config_only(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CASE["config"] | changes))
    return folder


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_opened(name, tmp_path):
    canary = tmp_path / "canary"
    config_only(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
    text = refusal(WeightsError, lambda: load_model(tmp_path, dtype=jnp.float32))
    assert name in text
    assert not canary.exists()


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy"])
def test_code_named_by_auto_map_is_never_imported(load_format, tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "modeling_own.py").write_text(f"open({str(canary)!r}, 'w')\n")
    auto_map = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Config"}
    config = CASE["config"] | {"auto_map": auto_map}
    write_checkpoint(tmp_path, config, tiny_tensors(CASE))
    text = refusal(
        ConfigError, lambda: load_model(tmp_path, dtype=jnp.float32, load_format=load_format)
    )
    assert "auto_map" in text
    assert not canary.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"a": \xff}', "[" * 100_000], ids=lambda text: text[:4]
)
def test_a_damaged_configuration_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    call = refusal(
        ConfigError, lambda: load_model(tmp_path, dtype=jnp.float32, load_format="dummy")
    )
    assert "config.json" in call


def test_a_folder_without_weights_is_one_line(tmp_path):
    text = refusal(WeightsError, lambda: load_model(config_only(tmp_path), dtype=jnp.float32))
    assert "model.safetensors" in text


def test_an_empty_folder_is_no_model(tmp_path):
    text = refusal(ConfigError, lambda: find_checkpoint(tmp_path, "auto", None))
    assert "config.json" in text


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    text = refusal(ConfigError, lambda: find_checkpoint(tmp_path / "model.bin", "auto", None))
    assert "model.bin" in text


def test_the_only_gguf_file_of_a_folder_is_taken_and_of_two_none(tmp_path):
    (tmp_path / "one.gguf").write_bytes(b"")
    assert find_checkpoint(tmp_path, "auto", None).path == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"")
    assert "2 GGUF" in refusal(ConfigError, lambda: find_checkpoint(tmp_path, "auto", None))


def test_the_asked_format_must_be_the_one_found(tmp_path):
    config_only(tmp_path)
    assert "gguf" in refusal(ConfigError, lambda: find_checkpoint(tmp_path, "gguf", None))
    (tmp_path / "m.gguf").write_bytes(b"")
    path = tmp_path / "m.gguf"
    assert "GGUF" in refusal(ConfigError, lambda: find_checkpoint(path, "safetensors", None))


@pytest.mark.parametrize("name", ["/no/such/folder", "./no", "a/b/c", "a b", "../up", ""])
def test_what_is_neither_path_nor_hub_id_is_refused_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    refusal(ConfigError, lambda: find_checkpoint(name, "auto", None))


def test_a_hub_that_cannot_be_asked_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    text = refusal(ConfigError, lambda: find_checkpoint("owner/absent-model", "auto", None))
    assert "owner/absent-model" in text


def test_only_harmless_files_are_fetched_from_the_hub(monkeypatch, tmp_path):
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(config_only(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_checkpoint("owner/model", "dummy", "v2", "models").path == tmp_path
    assert (asked["repo"], asked["revision"]) == ("owner/model", "v2")
    assert asked["cache_dir"] == "models"
    patterns = asked["allow_patterns"]
    for name in ("pytorch_model.bin", "model.pt", "modeling_own.py", "model.safetensors"):
        assert not any(fnmatch(name, pattern) for pattern in patterns)
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        assert any(fnmatch(name, pattern) for pattern in patterns)
