import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_are_divided_by_their_root_mean_square_in_float32(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2, 8)) * 100, dtype)  # squares overflow float16
    norm = RMSNorm(8, eps=1e-6)
    norm.scale[...] = jnp.linspace(0.5, 2.0, 8)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * np.linspace(0.5, 2.0, 8)
    got = norm(x)
    assert got.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2 * eps)


def test_a_row_of_zeros_stays_zero():
    assert not np.any(RMSNorm(4, eps=1e-6)(jnp.zeros((1, 4))))
