"""Shards of weights on meshes, from files that know nothing of meshes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.sharding import make_placement
from jaxpaged.weights import placing
from jaxpaged.weights.loader import load_model, open_model
from tests.support.checkpoints import golden_cases, tiny_tensors, write_checkpoint
from tests.support.params import assert_laid_out
from tests.weights.test_gguf import write_case

CASES = golden_cases()


def on_mesh(path, num_shards, num_stages=1, dtype=jnp.float32):
    sizes = ParallelSettings(tensor_parallel_size=num_shards, pipeline_parallel_size=num_stages)
    return open_model(path, dtype=dtype, placement=make_placement(sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    case = CASES["llama_linear_rope_biases"]
    return write_checkpoint(tmp_path_factory.mktemp("m"), case["config"], tiny_tensors(case))


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize(("num_shards", "num_stages"), [(2, 2), (4, 1)])
def test_every_device_gets_its_part_of_what_one_device_has(
    num_shards, num_stages, format, folder, tmp_path
):
    if format == "gguf":
        folder = write_case(tmp_path / "m.gguf", "llama", "llama", rope__freq_base=10000.0)[0]
    whole = load_model(folder, dtype=jnp.float32).params
    files = on_mesh(folder, num_shards, num_stages)
    assert_laid_out(files, whole, files.load().params)


def test_shards_are_cast_and_take_turns_when_memory_is_short(folder, monkeypatch):
    monkeypatch.setattr(placing, "MAX_HOST_BYTES", 1)
    table = on_mesh(folder, 4, dtype=jnp.bfloat16).load().params["lm_head"]["table"]
    wanted = load_model(folder, dtype=jnp.bfloat16).params["lm_head"]["table"]
    assert table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(table), np.asarray(wanted))
