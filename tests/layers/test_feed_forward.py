from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpaged.layers import linear
from jaxpaged.layers.feed_forward import FeedForward
from jaxpaged.sharding import TENSOR
from pallas_kernels.fused_norm import whole
from tests.layers.shapes import TINY
from tests.support.products import in_two_parts

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(_erf)(x / np.sqrt(2))),
}


def _erf(x: float) -> float:
    from math import erf

    return erf(x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_it_is_the_gated_product(activation, mlp_bias):
    config = replace(TINY, activation=activation, mlp_bias=mlp_bias)
    block = FeedForward(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    biases = np.zeros((2, config.ffn)), np.zeros(config.embed)
    if mlp_bias:
        biases = rng.standard_normal((2, config.ffn)), rng.standard_normal(config.embed)
        block.gate_up_bias[...] = jnp.asarray(biases[0], jnp.float32)
        block.down_bias[...] = jnp.asarray(biases[1], jnp.float32)
    x = rng.standard_normal((5, config.embed)).astype(np.float32)
    gate, up = np.asarray(block.gate_up[...], np.float64)
    inner = ACTIVATIONS[activation](x @ gate.T + biases[0][0]) * (x @ up.T + biases[0][1])
    want = inner @ np.asarray(block.down[...], np.float64).T + biases[1]
    np.testing.assert_allclose(block(jnp.asarray(x)), want, atol=2e-5)


@pytest.fixture
def products_in_parts(monkeypatch):
    """Every product that may goes in two parts, as few do on Hopper."""
    monkeypatch.setattr(linear, "goes_in_parts", lambda x, weight: True)
    monkeypatch.setattr(linear, "product_in_parts", in_two_parts)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (2, 5 + 3, TINY.embed)),
        ({"mlp_bias": True}, (5, TINY.embed)),  # which would be added to no part
        ({"post_norms": True}, (5, TINY.embed)),  # whose norm takes the sum
    ],
)
def test_it_comes_in_parts_where_the_next_norm_adds_it(options, shape, products_in_parts):
    block = FeedForward(replace(TINY, **options), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.ones((5, TINY.embed), jnp.bfloat16)
    added, nothing = block(x), block.nothing(x)
    assert added.shape == nothing.shape == shape
    assert added.dtype == nothing.dtype
    assert not nothing.any()


def test_of_several_devices_it_is_whole_and_one_all_reduce(products_in_parts):
    block = FeedForward(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(block)
    params = nnx.to_pure_dict(weights)
    splits = {"gate_up": P(None, TENSOR), "down": P(None, TENSOR)}

    def run(params, x):
        block = nnx.merge(graphdef, params)
        return block(x), block.nothing(x)

    mesh = Mesh(jax.devices()[:2], (TENSOR,))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, TINY.embed)), jnp.float32)
    split = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(splits, P()), out_specs=P(), check_vma=False)
    )
    added, nothing = split(params, x)
    np.testing.assert_allclose(added, whole(block(x), x), atol=1e-5)
    assert nothing.shape == added.shape
    assert split.lower(params, x).as_text().count("stablehlo.all_reduce") == 1
