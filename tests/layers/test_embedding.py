import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.layers.embedding import Embedding
from tests.layers.shapes import TINY


def embedding(scale, dtype):
    return Embedding(TINY, scale=scale, dtype=dtype, rngs=nnx.Rngs(0))


def test_each_token_takes_its_row():
    table = embedding(1.0, jnp.float32)
    ids = jnp.array([3, 0, 10, 3], jnp.int32)
    np.testing.assert_array_equal(table(ids), np.asarray(table.table[...])[np.asarray(ids)])


def test_the_scale_is_rounded_to_the_weights_type_first():
    table = embedding(55.4256, jnp.bfloat16)  # 55.5 in bfloat16
    got = table(jnp.array([1], jnp.int32))
    want = table.table[...][1:2] * jnp.bfloat16(55.5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


def test_logits_are_float32_and_unscaled():
    table = embedding(3.0, jnp.bfloat16)
    hidden = jnp.ones((2, TINY.embed), jnp.bfloat16)
    logits = table.logits(hidden)
    assert logits.dtype == jnp.float32
    want = np.asarray(table.table[...], np.float32).sum(-1)
    np.testing.assert_allclose(logits[0], want, rtol=1e-5, atol=1e-6)
