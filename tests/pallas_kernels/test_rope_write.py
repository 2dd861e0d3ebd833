from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.rope_write import rotate_and_write
from tests.support.cuda_target import KERNEL, lower_for_hopper, struct

KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, PAGES = 2, 3, 8, 4, 6
EPS = 1e-6
op = partial(rotate_and_write, eps=EPS)
plain = partial(op, norms=None)


def case(slots: list[int], dtype=jnp.float32) -> list:
    """Arguments of the op over a pool of NaN."""
    rng, tokens = np.random.default_rng(0), len(slots)
    qkv = rng.standard_normal((tokens, KV_HEADS, GROUP + 2, HEAD_DIM))
    angles = rng.uniform(0, 6, (tokens, HEAD_DIM // 2)).astype(np.float32)
    pool = jnp.full((PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), np.nan, dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return [jnp.asarray(qkv, dtype), cos, sin, pool, pool, jnp.asarray(slots, jnp.int32)]


def turned(x, cos, sin):
    """Each pair as one complex number, times the angle's."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    angle = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    product = (x[..., :half] + 1j * x[..., half:]) * angle[:, None, None]
    return np.concatenate([product.real, product.imag], axis=-1)


def test_queries_and_keys_are_turned_and_values_are_not():
    slots = [5, 22, 9]
    arguments = case(slots)
    q, k_pages, v_pages = plain(*arguments)
    wanted = turned(*arguments[:3])
    np.testing.assert_allclose(q, wanted[:, :, :GROUP].reshape(3, -1, HEAD_DIM), atol=1e-6)
    page, offset = np.divmod(slots, PAGE_SIZE)
    np.testing.assert_allclose(k_pages[page, :, offset], wanted[:, :, GROUP], atol=1e-6)
    np.testing.assert_array_equal(v_pages[page, :, offset], arguments[0][:, :, GROUP + 1])


def test_nothing_but_the_named_slots_is_written():
    _, k_pages, v_pages = plain(*case([5, 22, 9, PAGES * PAGE_SIZE]))  # the last is past the pool
    for pages in (k_pages, v_pages):
        written = np.isfinite(pages).all(axis=(1, 3)).reshape(-1)
        assert np.flatnonzero(written).tolist() == [5, 9, 22]
        assert np.isnan(np.asarray(pages)).sum() == pages.size - 3 * KV_HEADS * HEAD_DIM


def test_padding_goes_to_the_null_page():
    _, k_pages, v_pages = plain(*case([7, 0, 0]))
    assert np.isfinite(k_pages[0, :, 0]).all()
    assert np.isnan(v_pages[1:, :, :].at[0, :, 3].set(np.nan)).all()


def test_head_norms_come_before_the_turn_and_spare_the_values():
    arguments = case([5, 22])
    factors = jnp.linspace(0.5, 2.0, HEAD_DIM), jnp.linspace(-1.0, 1.0, HEAD_DIM)
    q, k_pages, v_pages = op(*arguments, norms=factors)
    x = np.asarray(arguments[0], np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    wanted_q = turned(normed * np.asarray(factors[0]), *arguments[1:3])[:, :, :GROUP]
    wanted_k = turned(normed * np.asarray(factors[1]), *arguments[1:3])[:, :, GROUP]
    np.testing.assert_allclose(q, wanted_q.reshape(2, -1, HEAD_DIM), atol=2e-6)
    np.testing.assert_allclose(k_pages[[1, 5], :, [1, 2]], wanted_k, atol=2e-6)
    np.testing.assert_array_equal(v_pages[[1, 5], :, [1, 2]], arguments[0][:, :, GROUP + 1])


def biased(arguments, dtype=jnp.float32):
    """A bias for `arguments`, and qkv with it in float64."""
    shape = arguments[0].shape[1:]
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(shape) * 3, dtype)
    return bias, np.asarray(arguments[0], np.float64) + np.asarray(bias, np.float64)


def test_a_bias_is_added_to_queries_keys_and_values_and_the_sum_is_not_rounded():
    arguments = case([5, 22])
    arguments[0] = arguments[0].astype(jnp.bfloat16)
    bias, total = biased(arguments, jnp.bfloat16)
    q, k_pages, v_pages = plain(*arguments, bias=bias)  # the pages are float32
    wanted = turned(total, *arguments[1:3])
    np.testing.assert_allclose(q, wanted[:, :, :GROUP].reshape(2, -1, HEAD_DIM), atol=2e-6)
    np.testing.assert_allclose(k_pages[[1, 5], :, [1, 2]], wanted[:, :, GROUP], atol=2e-6)
    np.testing.assert_allclose(v_pages[[1, 5], :, [1, 2]], total[:, :, GROUP + 1], rtol=1e-6)


def test_a_biased_value_is_rounded_once_to_the_type_of_the_pages():
    arguments = case([5, 22], jnp.bfloat16)
    bias, total = biased(arguments, jnp.bfloat16)
    _, _, v_pages = plain(*arguments, bias=bias)
    wanted = jnp.asarray(total[:, :, GROUP + 1], jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(v_pages[jnp.array([1, 5]), :, jnp.array([1, 2])], wanted)


def test_a_bias_comes_before_the_head_norms():
    arguments = case([5, 22])
    bias, total = biased(arguments)
    factors = jnp.linspace(0.5, 2.0, HEAD_DIM), jnp.linspace(-1.0, 1.0, HEAD_DIM)
    got = op(*arguments, norms=factors, bias=bias)
    arguments[0] = jnp.asarray(total, jnp.float32)
    for ours, theirs in zip(got, op(*arguments, norms=factors), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_results_have_the_type_of_the_pages():
    arguments = case([5])
    arguments[3:5] = (pages.astype(jnp.float16) for pages in arguments[3:5])
    assert {x.dtype.name for x in plain(*arguments)} == {"float16"}


def lowered(
    kv_heads, group, head_dim, *, tokens=3, normed=False, has_bias=False, dtype=jnp.bfloat16
):
    pool = struct(1000, kv_heads, 16, head_dim, dtype=dtype)
    table = struct(tokens, head_dim // 2, dtype="f4")
    factors = [struct(head_dim, dtype="f4")] * (2 * normed)
    bias = struct(kv_heads, group + 2, head_dim, dtype=dtype) if has_bias else None
    return lower_for_hopper(
        lambda bias, *args: op(*args[:6], norms=args[6:] or None, bias=bias),
        bias,
        struct(tokens, kv_heads, group + 2, head_dim, dtype=dtype),
        table,
        table,
        pool,
        pool,
        struct(tokens, dtype="i4"),
        *factors,
        donate=(4, 5),
    )


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "options"),
    [
        (8, 4, 128, {}),
        (2, 7, 64, {}),
        (2, 7, 64, {"has_bias": True}),
        (4, 7, 128, {"has_bias": True}),
        (1, 1, 96, {}),
        (1, 4, 256, {"normed": True}),
        (8, 4, 128, {"normed": True}),
        (8, 4, 128, {"normed": True, "has_bias": True}),
    ],
)
@pytest.mark.parametrize("tokens", [1, 61])
def test_on_hopper_it_is_one_kernel_that_writes_in_place(
    kv_heads, group, head_dim, options, tokens
):
    dtype = jnp.float16 if tokens == 1 else jnp.bfloat16
    text = lowered(kv_heads, group, head_dim, tokens=tokens, dtype=dtype, **options)
    assert text.count(KERNEL) == 1
    assert "stablehlo.add" not in text  # of a bias
    (call,) = (line for line in text.splitlines() if KERNEL in line)
    assert call.count("output_operand_alias<") == 2


def test_on_hopper_what_the_kernel_cannot_do_runs_on_xla():
    assert KERNEL not in lowered(2, 2, 24)
    assert KERNEL not in lowered(2, 2, 96, normed=True)
    assert KERNEL not in lowered(2, 2, 64, dtype=jnp.float32)


def test_blocks_without_a_query_head_are_refused():
    arguments = case([5])
    arguments[0] = arguments[0][:, :, :2]
    with pytest.raises(KernelArgumentError, match="3 or more blocks"):
        plain(*arguments)


def test_angles_of_another_width_are_refused():
    arguments = case([5])
    arguments[1:3] = (table[:, :2] for table in arguments[1:3])
    with pytest.raises(KernelArgumentError, match="a head_dim of twice half"):
        plain(*arguments)


def test_norm_factors_of_another_type_are_refused():
    factors = jnp.ones(HEAD_DIM, jnp.bfloat16), jnp.ones(HEAD_DIM)
    with pytest.raises(KernelArgumentError, match=r"norms\[0\] is bfloat16, allowed: float32"):
        op(*case([5]), norms=factors)


def test_a_bias_of_another_shape_or_type_is_refused():
    arguments = case([5])
    bias, _ = biased(arguments)
    with pytest.raises(KernelArgumentError, match=r"bias has shape .* with kv_heads = 2"):
        plain(*arguments, bias=bias[:1])
    with pytest.raises(KernelArgumentError, match="bias is float16, allowed: float32"):
        plain(*arguments, bias=bias.astype(jnp.float16))
