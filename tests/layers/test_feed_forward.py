from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.layers.feed_forward import FeedForward
from tests.layers.shapes import TINY

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
