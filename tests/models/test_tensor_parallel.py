"""Every family on several devices: the logits of one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.layers.attention import paged_attention
from jaxpaged.models.decoder import init_device_state
from jaxpaged.sharding import laid_out, make_placement, repeat_kv_heads
from jaxpaged.weights.loader import abstract_model, open_model
from tests.layers.shapes import TINY
from tests.support.checkpoints import (
    golden_cases,
    golden_logits,
    tiny_tensors,
    write_checkpoint,
    write_variant,
)
from tests.support.decoding import PAGE_SIZE, PAGES_PER_SEQ, SPARE_SLOT, logits_of, one_row_batch

CASES = golden_cases()
# of 4 heads and 2 KV heads: on 4 devices each KV head is on two
DEVICES = {
    "llama_linear_rope_biases": 4, "mistral_window": 2, "qwen2": 2, "qwen3": 2, "gemma3": 4,
}  # fmt: skip


def placed(num_devices):
    placement = make_placement(ParallelSettings(tensor_parallel_size=num_devices))
    assert placement is not None
    return placement


def logits_on_mesh(graphdef, params, model, placement, token_ids):
    """Of a prompt in one chunk."""
    mesh = placement.stages[0]
    shapes = PAGES_PER_SEQ + 1, PAGE_SIZE, SPARE_SLOT, jnp.float32
    state = init_device_state(laid_out(model, placement.num_shards), *shapes, mesh)

    def step(params, state, batch):
        decoder = nnx.merge(graphdef, params)
        return decoder.unembed(decoder(batch, state)[0])

    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
    split = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, P()), out_specs=P(None, "tensor"), check_vma=False
    )
    options = {"xla_backend_optimization_level": 0}
    batch = one_row_batch(token_ids, 0)
    return np.asarray(jax.jit(split, compiler_options=options)(params, state, batch))


@pytest.mark.parametrize("name", DEVICES)
def test_a_familys_logits_on_a_mesh_are_those_of_transformers(name, tmp_path):
    case = CASES[name]
    write_checkpoint(tmp_path, case["config"], tiny_tensors(case))
    placement = placed(DEVICES[name])
    loaded = open_model(tmp_path, dtype=jnp.float32, placement=placement).load()
    logits = logits_on_mesh(
        loaded.graphdef, loaded.params, loaded.config, placement, case["token_ids"]
    )
    np.testing.assert_allclose(logits, golden_logits(name), rtol=0, atol=1e-4)


# a head of its own; and a tied one, with a soft cap
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
def test_a_vocabulary_that_does_not_divide_is_padded_and_no_padding_is_likely(name, tmp_path):
    write_variant(name, tmp_path, vocab_size=61)
    one = open_model(tmp_path, dtype=jnp.float32).load()
    token_ids = [60, 1, 4, 17, 5, 59]
    wanted = logits_of(one.graphdef, one.params, one.config, token_ids, [len(token_ids)])
    placement = placed(2)
    loaded = open_model(tmp_path, dtype=jnp.float32, placement=placement).load()
    rows = loaded.params["embedding"]["table"]
    assert rows.shape[0] == 128
    assert not np.asarray(rows)[61:].any()
    found = logits_on_mesh(loaded.graphdef, loaded.params, one.config, placement, token_ids)
    np.testing.assert_allclose(found[:, :61], wanted, rtol=0, atol=1e-5)
    assert (found[:, 61:] == -np.inf).all()


def test_eight_devices_with_two_kv_heads_give_the_logits_of_one():
    model = replace(TINY, vocab=16, ffn=16, heads=8, qkv_bias=True)
    graphdef, shapes = abstract_model(model, paged_attention, jnp.float32)
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(x.dtype), shapes)
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6]
    wanted = logits_of(graphdef, params, model, token_ids, [8])

    placement = placed(8)
    stored = laid_out(model, 8)
    graphdef, shapes = abstract_model(stored, paged_attention, jnp.float32, placement)

    def place(x, to):
        x = repeat_kv_heads(x, 8) if x.shape != to.shape else x
        return jax.device_put(x, to.sharding)

    placed_params = jax.tree.map(place, params, shapes)
    found = logits_on_mesh(graphdef, placed_params, model, placement, token_ids)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.argmax(1), wanted.argmax(1))
