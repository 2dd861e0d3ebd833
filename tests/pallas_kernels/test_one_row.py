from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.bench import one_row_op
from pallas_kernels import tuning
from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.one_row import BlockWeights, goes_alone, one_row_block, one_row_reference
from tests.support.cuda_target import KERNEL, hopper_target, lower_for_hopper, struct

EPS = 1e-5
COUNTERS = struct(tuning.ONE_ROW_COUNTERS, dtype=jnp.int32)


def weights_of(heads, embed, ffn, columns, dtype):
    scale = struct(embed, dtype=jnp.float32)
    gate_up, down = struct(2, ffn, embed, dtype=dtype), struct(embed, ffn, dtype=dtype)
    weights = BlockWeights(struct(embed, heads, dtype=dtype), scale, gate_up, down)
    if columns:
        qkv = struct(columns, embed, dtype=dtype)
        weights = weights._replace(attention_scale=scale, qkv=qkv)
    return weights


def arguments(heads, embed, ffn, columns, dtype):
    weights = weights_of(heads, embed, ffn, columns, dtype)
    return struct(1, heads, dtype=dtype), struct(1, embed, dtype=dtype), weights, COUNTERS


def zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@pytest.mark.parametrize("shape", one_row_op.SHAPES)
def test_on_hopper_a_row_goes_from_attention_to_the_next_queries_in_one_kernel(shape):
    *sizes, activation, dtype = shape
    op = partial(one_row_block, activation=activation, eps=EPS)
    text = lower_for_hopper(op, *arguments(*sizes, dtype))
    assert text.count(KERNEL) == 1
    assert "dot_general" not in text


USUAL = {"heads": 512, "embed": 256, "ffn": 512, "columns": 640, "dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("changed", "activation"),
    [
        ({"heads": 480}, "silu"),
        ({"embed": 6208}, "silu"),  # wider than a warpgroup holds
        ({"ffn": 6208 * 8}, "silu"),
        ({"columns": 600}, "silu"),
        ({"dtype": jnp.float32}, "silu"),
        ({}, "gelu"),
    ],
)
def test_other_rows_take_the_usual_way(changed, activation):
    usual, other = zeros(arguments(**USUAL)), zeros(arguments(**{**USUAL, **changed}))
    with hopper_target():
        assert goes_alone(usual[2], activation="silu")
        assert not goes_alone(other[2], activation=activation)
        with pytest.raises(KernelArgumentError, match="ask goes_alone first"):
            one_row_block(*other, activation=activation, eps=EPS)


def test_two_rows_are_refused():
    seen, residual, *rest = zeros(arguments(**USUAL))
    two = [jnp.concatenate([x, x]) for x in (seen, residual)]
    with hopper_target(), pytest.raises(KernelArgumentError, match="ask goes_alone first"):
        one_row_block(*two, *rest, activation="silu", eps=EPS)


def test_nothing_goes_alone_without_a_hopper_gpu():
    assert not goes_alone(zeros(weights_of(**USUAL)), activation="silu")


@pytest.mark.parametrize("cores", [114, 132])
def test_programs_that_wait_for_each_other_need_the_whole_card(monkeypatch, tmp_path, cores):
    class Device:
        core_count = cores

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert tuning.runs_together.__wrapped__() is (cores == 132)
    (tmp_path / "control").touch()  # another process may run at the same time
    assert not tuning.runs_together.__wrapped__()


@pytest.mark.parametrize("shape", one_row_op.SHAPES)
def test_all_of_each_product_is_shared_out_once(shape):
    from pallas_kernels.one_row.plan import Product

    heads, embed, ffn, columns = shape[:4]
    for rows, inner in ((embed, heads), (2 * ffn, embed), (embed, ffn), (columns, embed)):
        product = Product(rows, inner, tuning.one_row_parts(rows, inner))
        units = [
            (program % product.parts, tile)
            for program in range(tuning.MULTIPROCESSORS)
            if program // product.parts < product.sharers
            for tile in range(program // product.parts, product.tiles, product.sharers)
        ]
        assert sorted(units) == [(p, t) for p in range(product.parts) for t in range(product.tiles)]
        assert product.steps * product.parts * tuning.PRODUCT_BLOCK == inner


def test_the_reference_is_the_usual_way_through_a_layer():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    seen, residual = normal(1, 24), normal(1, 16)
    weights = BlockWeights(
        normal(16, 24), normal(16), normal(2, 40, 16), normal(16, 40), normal(16), normal(48, 16)
    )
    total, qkv = one_row_reference(seen, residual, weights, activation="silu", eps=EPS)

    def norm(x, scale):
        return x / jnp.sqrt((x * x).mean() + EPS) * scale[None]

    x = residual + seen @ weights.out.T
    inner = norm(x, weights.feed_forward_scale)
    gate, up = inner @ weights.gate_up[0].T, inner @ weights.gate_up[1].T
    x = x + (jax.nn.silu(gate) * up) @ weights.down.T
    np.testing.assert_allclose(total, x, rtol=1e-4)
    wanted = norm(x, weights.attention_scale) @ weights.qkv.T
    np.testing.assert_allclose(qkv, wanted, rtol=1e-3, atol=1e-4)


def test_a_row_that_is_right_passes_its_check_and_one_without_its_norm_fails(monkeypatch):
    def way(seen, residual, weights, counters, *, activation):
        made = one_row_reference(seen, residual, weights, activation=activation, eps=EPS)
        return *made, counters

    monkeypatch.setattr(one_row_op, "SHAPES", ((64, 32, 48, 96, "silu", "bfloat16"),))
    monkeypatch.setattr(one_row_op, "_kernel", way)
    assert next(one_row_op.check("one-row", 2))["passed"]

    def wrong(seen, residual, weights, counters, *, activation):
        weights = weights._replace(feed_forward_scale=weights.feed_forward_scale[::-1])
        return way(seen, residual, weights, counters, activation=activation)

    monkeypatch.setattr(one_row_op, "_kernel", wrong)
    assert not next(one_row_op.check("one-row", 2))["passed"]
