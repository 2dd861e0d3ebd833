from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.layers.attention import paged_attention
from jaxpaged.models import decoder as decoder_module
from jaxpaged.models import one_row
from jaxpaged.models.decoder import Decoder, init_device_state
from pallas_kernels.one_row import one_row_reference
from tests.layers.shapes import TINY
from tests.support.cuda_target import KERNEL, hopper_target, lower_for_hopper
from tests.support.decoding import one_row_batch

WIDE = replace(TINY, embed=256, heads=4, kv_heads=2, head_dim=64, ffn=512)


def made(config, dtype=jnp.float32):
    return Decoder(config, paged_attention, dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_alone_gives_what_the_layers_give_one_after_the_other(monkeypatch, has_bias):
    config = replace(TINY, qkv_bias=has_bias)
    decoder = made(config)

    def run(token, position, state):
        return decoder(one_row_batch([token], position), state)

    calls = []

    def block(seen, residual, weights, counters, *, activation, eps):
        calls.append(weights.qkv is not None)
        both = one_row_reference(seen, residual, weights, activation=activation, eps=eps)
        return *both, counters + 1

    state = init_device_state(config, 8, 16, 4, jnp.float32)
    usual, usual_state = run(3, 0, state)
    usual, usual_state = run(5, 1, usual_state)
    monkeypatch.setattr(one_row, "one_row_block", block)
    monkeypatch.setattr(decoder_module, "is_one_row", lambda layers, x: True)
    alone, alone_state = run(3, 0, state)
    alone, alone_state = run(5, 1, alone_state)
    assert True in calls
    assert calls[-1] is False  # after the last layer comes no other's projection
    np.testing.assert_allclose(alone, usual, rtol=2e-4, atol=2e-5)
    for ours, theirs in zip(alone_state.kv_pages, usual_state.kv_pages, strict=True):
        np.testing.assert_allclose(ours.k, theirs.k, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(ours.v, theirs.v, rtol=2e-4, atol=2e-5)


def lowered(config, rows):
    graphdef, weights = nnx.split(made(config, jnp.bfloat16))
    return lower_for_hopper(
        lambda params, batch, state: nnx.merge(graphdef, params)(batch, state),
        nnx.to_pure_dict(weights),
        one_row_batch(list(range(rows)), 0),
        init_device_state(config, 8, 16, 4, jnp.bfloat16),
        donate=(2,),
    )


def test_on_hopper_a_layer_of_one_row_is_three_kernels():
    text = lowered(WIDE, rows=1)
    # rotate and write, attention, and one from there to the next queries: one text for all layers
    # but the last; and the last norm
    assert text.count(KERNEL) == 3 + 3 + 1
    assert text.count("stablehlo.dot_general") == 1  # the first layer's queries


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, 2),
        ({"mlp_bias": True}, 1),
        ({"output_bias": True}, 1),
        ({"post_norms": True}, 1),
        ({"ffn": 480}, 1),
    ],
)
def test_other_steps_go_layer_by_layer(changed, rows):
    config = replace(WIDE, **changed)
    assert lowered(config, rows).count("stablehlo.dot_general") > 1
    layers = made(config, jnp.bfloat16).layers
    x = jnp.zeros((rows, config.embed), jnp.bfloat16)
    with hopper_target():
        assert not one_row.is_one_row(layers, x)
        assert one_row.is_one_row(made(WIDE, jnp.bfloat16).layers, x) is (rows == 1)
