from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.fused_norm import add_rms_norm, rms_norm
from tests.support.cuda_target import KERNEL, lower_for_hopper, struct

EPS = 1e-5
op = partial(add_rms_norm, eps=EPS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_sum_is_rounded_and_then_normed_in_float32(dtype):
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.standard_normal((5, 96)) * 200, dtype) for _ in range(2))
    scale = jnp.asarray(rng.standard_normal(96), jnp.float32)
    normed, total = op(x, residual, scale)
    assert normed.dtype == total.dtype == dtype
    np.testing.assert_array_equal(total, x + residual)
    exact = np.asarray(total, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPS) * np.asarray(scale)
    rtol = 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=rtol)


def test_it_is_an_addition_and_then_the_plain_norm():
    rng = np.random.default_rng(1)
    x, residual = (jnp.asarray(rng.standard_normal((3, 8)), jnp.float32) for _ in range(2))
    scale = jnp.linspace(0.5, 2.0, 8)
    np.testing.assert_array_equal(op(x, residual, scale)[0], rms_norm(x + residual, scale, eps=EPS))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parts_are_added_up_and_rounded_first(dtype):
    rng = np.random.default_rng(2)
    parts = jnp.asarray(rng.standard_normal((3, 6, 8)), jnp.float32).at[:, 4:].set(jnp.nan)
    residual = jnp.asarray(rng.standard_normal((4, 8)), dtype)
    scale = jnp.linspace(0.5, 2.0, 8)
    added = (parts[0] + parts[1] + parts[2])[:4].astype(dtype)
    for got, wanted in zip(op(parts, residual, scale), op(added, residual, scale), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, wanted)


def test_on_hopper_parts_are_added_up_by_the_kernel():
    parts, residual = struct(2, 256, 4096, dtype="f4"), struct(224, 4096)
    text = lower_for_hopper(op, parts, residual, struct(4096, dtype="f4"))
    assert text.count(KERNEL) == 1
    assert "stablehlo.add" not in text


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 3, 8), jnp.float32, "x has 3 rows a part, residual 4, allowed: as many or more"),
        ((2, 4, 8), jnp.bfloat16, "x is bfloat16, allowed: float32"),
        ((2, 4, 7), jnp.float32, "embed = 7"),
    ],
)
def test_parts_that_do_not_fit_are_refused(shape, dtype, message):
    with pytest.raises(KernelArgumentError, match=message):
        op(jnp.zeros(shape, dtype), jnp.zeros((4, 8), jnp.bfloat16), jnp.ones(8))


@pytest.mark.parametrize(
    ("rows", "embed"), [(1, 4096), (64, 640), (256, 896), (8, 5120), (2, 16384), (8192, 3584)]
)
def test_on_hopper_it_is_one_kernel(rows, embed):
    x = struct(rows, embed, dtype="bfloat16" if rows > 1 else "float16")
    text = lower_for_hopper(op, x, x, struct(embed, dtype="f4"))
    assert text.count(KERNEL) == 1


@pytest.mark.parametrize(("embed", "dtype"), [(100, jnp.bfloat16), (4096, jnp.float32)])
def test_on_hopper_other_widths_and_types_run_on_xla(embed, dtype):
    rows = struct(2, embed, dtype=dtype)
    assert KERNEL not in lower_for_hopper(op, rows, rows, struct(embed, dtype="f4"))


def test_a_residual_of_another_type_is_refused():
    x = jnp.zeros((2, 8), jnp.bfloat16)
    with pytest.raises(KernelArgumentError, match="residual is float32, allowed: bfloat16"):
        op(x, x.astype(jnp.float32), jnp.ones(8))


def test_a_scale_of_another_width_is_refused():
    x = jnp.zeros((2, 8), jnp.bfloat16)
    with pytest.raises(KernelArgumentError, match=r"scale has shape \(4,\).*embed = 8"):
        op(x, x, jnp.ones(4))
