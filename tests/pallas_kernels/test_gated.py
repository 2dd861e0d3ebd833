import math
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.gated import gated
from tests.support.cuda_target import KERNEL, lower_for_hopper, struct

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_first_half_is_the_gate_of_the_second(activation, dtype):
    both = jnp.asarray(np.random.default_rng(0).standard_normal((4, 48)) * 3, dtype)
    gate, up = np.split(np.asarray(both, np.float64), 2, axis=-1)
    got = gated(both, activation=activation)
    assert got.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    wanted = ACTIVATIONS[activation](gate) * up
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2 * eps, atol=8 * 2**-23)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "ffn"), [(1, 14336), (3, 4864), (8192, 18944), (2, 8)])
def test_on_hopper_it_is_one_kernel(rows, ffn, activation):
    both = struct(rows, 2 * ffn, dtype="bfloat16" if rows > 1 else "float16")
    text = lower_for_hopper(partial(gated, activation=activation), both)
    assert text.count(KERNEL) == 1


@pytest.mark.parametrize(
    ("width", "activation", "dtype"),
    [(64, "gelu", jnp.bfloat16), (20, "silu", jnp.bfloat16), (64, "silu", jnp.float32)],
)
def test_on_hopper_other_activations_widths_and_types_run_on_xla(width, activation, dtype):
    both = struct(2, width, dtype=dtype)
    assert KERNEL not in lower_for_hopper(partial(gated, activation=activation), both)


def test_an_odd_width_is_refused():
    with pytest.raises(KernelArgumentError, match="rows of 7, allowed: an even width"):
        gated(jnp.zeros((2, 7)), activation="silu")


def test_an_unknown_activation_is_refused():
    with pytest.raises(KernelArgumentError, match="'relu', allowed: silu, gelu, gelu_tanh"):
        gated(jnp.zeros((2, 8)), activation="relu")
