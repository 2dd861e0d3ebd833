"""What checks the kernels on a GPU, tried here on code that is known to be right or wrong."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.bench import (
    attention_check,
    attention_times,
    kernels,
    product_op,
    sampler_ops,
    small_ops,
)
from jaxpaged.bench.attention_check import Shape
from jaxpaged.errors import ConfigError
from pallas_kernels.fused_norm import add_rms_norm_reference
from pallas_kernels.ragged_attention.xla import ragged_paged_attention_xla

SHAPES = (
    Shape(4, 2, 64, 16, seqs=3, max_kv_len=90, window=40, soft_cap=30.0, has_sinks=True),
    Shape(2, 2, 64, 16, seqs=3, max_kv_len=70),
)


def xla_attention(kernel, spec):
    def op(q, k, v, table, kv_lens, cu_q_lens, sinks):
        return ragged_paged_attention_xla(
            *(q, k, v, table, kv_lens, cu_q_lens, sinks), spec=spec, decode_only=kernel == "decode"
        )

    return jax.jit(op)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", attention_check.KERNELS)
def test_attention_that_is_right_passes_its_check(kernel, monkeypatch):
    monkeypatch.setattr(attention_check, "jitted_kernel", functools.cache(xla_attention))
    lines = attention_check.check(kernel, 2, SHAPES)
    assert [(line["cases"], line["passed"]) for line in lines] == [(2, True)] * 2


@pytest.mark.slow
def test_attention_that_reads_one_key_too_many_fails_its_check(monkeypatch):
    def greedy(kernel, spec):
        op = xla_attention(kernel, spec)
        return lambda q, k, v, table, kv_lens, *rest: op(q, k, v, table, kv_lens + 1, *rest)

    monkeypatch.setattr(attention_check, "jitted_kernel", greedy)
    (line,) = attention_check.check("decode", 1, SHAPES[1:])
    assert not line["passed"]


@pytest.mark.slow
def test_small_ops_that_are_right_pass_their_checks(monkeypatch):
    monkeypatch.setattr(small_ops, "_norm", small_ops._norm_reference)
    monkeypatch.setattr(small_ops, "_gated_by", small_ops._gated_reference_by)
    monkeypatch.setattr(small_ops, "_rope_by", small_ops._rope_reference_by)
    monkeypatch.setattr(small_ops, "NORM_SHAPES", small_ops.NORM_SHAPES[:1])
    monkeypatch.setattr(small_ops, "GATED_SHAPES", small_ops.GATED_SHAPES[6:7])
    monkeypatch.setattr(small_ops, "ROPE_SHAPES", ((2, 3, 64, 16, 20, True, True, "bfloat16"),))
    for op in small_ops.OPS:
        (line,) = small_ops.check(op, 3)
        assert line["passed"], line


@pytest.mark.slow
def test_a_gated_product_that_is_right_passes_its_check_and_one_without_its_gate_fails(monkeypatch):
    monkeypatch.setattr(product_op, "SHAPES", ((40, 64, 64, "silu", "bfloat16"),))
    monkeypatch.setattr(product_op, "_kernel", product_op._reference)
    assert next(product_op.check(product_op.GATED, 3))["passed"]
    monkeypatch.setattr(product_op, "_kernel", lambda x, w, activation: x @ w[1].T)
    assert not next(product_op.check(product_op.GATED, 3))["passed"]


@pytest.mark.slow
def test_a_product_in_parts_that_is_right_passes_its_check_and_one_of_a_part_fails(monkeypatch):
    def then_norm(x, weight, residual, scale):
        added = product_op.contract_last(x, weight, x.dtype)
        return add_rms_norm_reference(added, residual, scale, eps=small_ops.EPS)

    monkeypatch.setattr(product_op, "PARTS_SHAPES", ((40, 64, 128, "bfloat16"),))
    monkeypatch.setattr(product_op, "_parts_then_norm", then_norm)
    assert next(product_op.check(product_op.PARTS, 3))["passed"]
    monkeypatch.setattr(
        product_op, "_parts_then_norm", lambda x, w, *rest: then_norm(x[:, :64], w[:, :64], *rest)
    )
    assert not next(product_op.check(product_op.PARTS, 3))["passed"]


@pytest.mark.slow
def test_an_op_that_writes_one_slot_too_many_fails_its_check(monkeypatch):
    def careless(qkv, cos, sin, k_pages, v_pages, slots, **options):
        pools = (k_pages.at[3, :, 3].set(0), v_pages)
        return small_ops._rope_reference_by(qkv, cos, sin, *pools, slots, **options)

    monkeypatch.setattr(small_ops, "_rope_by", careless)
    monkeypatch.setattr(small_ops, "ROPE_SHAPES", ((2, 3, 64, 16, 20, False, False, "bfloat16"),))
    assert not next(small_ops.check("rope", 1))["passed"]


def test_rows_of_padding_do_not_count_and_neighbours_do():
    wanted = jnp.asarray([[1.0], [2.0]])
    counts = np.array([True, False])
    assert small_ops.error(jnp.asarray([[1.0], [math.nan]]), wanted, counts) == 0
    assert not small_ops.error(jnp.asarray([[math.nan], [2.0]]), wanted, counts) <= 1


@pytest.mark.slow
def test_the_samplers_check_passes_and_sees_a_dropped_token(monkeypatch):
    assert all(line["passed"] for line in sampler_ops.check(4, 700))

    def drops_best(logits, *parameters):
        kept = sampler_ops_filter(logits, *parameters)
        return kept.at[0, jnp.argmax(logits[0])].set(-jnp.inf)

    sampler_ops_filter = sampler_ops.filter_logits
    monkeypatch.setattr(sampler_ops, "filter_logits", drops_best)
    assert not all(line["passed"] for line in sampler_ops.check(4, 700))


@pytest.mark.slow
def test_a_timed_case_tells_bytes_and_operations_a_second(monkeypatch):
    monkeypatch.setattr(attention_times, "jitted_kernel", functools.cache(xla_attention))
    case = attention_times.Timed([1] * 2, [30, 40], 4, 2, 1.0)
    assert case.kv_bytes == 2 * 70 * 2 * 128 * 2
    assert case.flops == 4 * 4 * 128 * 70
    monkeypatch.setitem(attention_times.TIMED, "d1x8192", case)
    line = attention_times.time_case("d1x8192", "decode", 16, None)
    assert line["measured"] == line["us"] > 0
    assert line["peer"] == 17.3


def test_ops_that_there_are_not_are_refused():
    from argparse import Namespace

    with pytest.raises(ConfigError, match="atention"):
        kernels.run(Namespace(ops="atention"), report=None)
