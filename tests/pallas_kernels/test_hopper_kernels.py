"""The Mosaic GPU kernels lower for every choice of tiles and every option; plans are right.

What they compute is checked on a GPU: the tests marked `gpu`, and `jaxpaged bench kernels`.
"""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.bench import kernels, product_op
from pallas_kernels import tuning
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.decode_kernel import decode_attention
from pallas_kernels.ragged_attention.decode_plan import (
    MERGE_COST_TILES,
    DecodeStatic,
    plan_decode,
)
from pallas_kernels.ragged_attention.mixed_plan import MixedStatic, plan_mixed
from pallas_kernels.ragged_attention.prefill_kernel import mixed_attention
from pallas_kernels.spec import AttentionSpec
from tests.support.cuda_compile import lower_for_cuda

PLAIN = AttentionSpec(0.1)
TYPES = ("bfloat16", "float16")


def shape_of(group):
    """heads, kv_heads, head_dim, page_size, dtype, spec, has_sinks.

    Over all groups every head_dim meets every page size once, and each option comes several times.
    """
    column, row = divmod(group - 1, 4)
    head_dim = (128, 96, 256, 64)[row]  # 96 takes even groups alone
    kv_heads = 1 + group % 2
    dtype = TYPES[(column + row) % 2]
    spec = AttentionSpec(0.1, (None, 100)[group % 3 == 0], (None, 30.0)[group % 5 < 2])
    page_size = tuning.PAGE_SIZES[column]
    return group * kv_heads, kv_heads, head_dim, page_size, dtype, spec, group % 4 > 1


SHAPES = [shape_of(group) for group in (1, 2, 3, 4, 7, 8, 10, 16)]
OTHER_SHAPES = [shape_of(group) for group in (5, 6, 9, 11, 12, 13, 14, 15)]
EVERY_SHAPE = [*SHAPES, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHER_SHAPES)]


def arguments(tokens, seqs, shape):
    heads, kv_heads, head_dim, page_size, dtype, _, has_sinks = shape
    pool = jax.ShapeDtypeStruct((9, kv_heads, page_size, head_dim), dtype)
    q = jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype)
    table = jax.ShapeDtypeStruct((seqs, 8), jnp.int32)
    kv_lens, cu_q_lens = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (seqs, seqs + 1))
    sinks = jax.ShapeDtypeStruct((heads,), jnp.float32) if has_sinks else None
    return q, pool, pool, table, kv_lens, cu_q_lens, sinks


@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_the_decode_kernel_lowers_for_cuda(shape):
    q, k, v, table, kv_lens, _, sinks = arguments(6, 6, shape)
    op = functools.partial(decode_attention, spec=shape[5])
    assert "mosaic_gpu" in lower_for_cuda(op, q, k, v, table, kv_lens, sinks)


def test_a_row_of_fewer_heads_than_the_decode_kernel_loads_lowers_for_cuda():
    heads, *rest = shape_of(4)
    q, k, v, table, kv_lens, _, sinks = arguments(1, 1, (heads, *rest))
    assert heads < 8
    op = functools.partial(decode_attention, spec=PLAIN)
    assert "mosaic_gpu" in lower_for_cuda(op, q, k, v, table, kv_lens, sinks)


@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_the_mixed_kernel_lowers_for_cuda(shape):
    op = functools.partial(mixed_attention, spec=shape[5])
    assert "mosaic_gpu" in lower_for_cuda(op, *arguments(40, 6, shape))


def test_tiles_for_long_chunks_lower_for_cuda():
    tokens, seqs = 2048, 2
    tiles = [tuning.mixed_tiles(128, tokens=n, seqs=seqs) for n in (seqs, tokens)]
    assert tiles[0] != tiles[1]
    op = functools.partial(mixed_attention, spec=PLAIN)
    assert "mosaic_gpu" in lower_for_cuda(op, *arguments(tokens, seqs, shape_of(5)))


def test_the_lowered_shapes_cover_tiles_types_pages_groups_and_options():
    """Tiles, pages, types and each option in every run; all pairs of some in `make test-slow`."""
    for values, column in ((tuning.HEAD_DIMS, 2), (tuning.PAGE_SIZES, 3), (TYPES, 4)):
        assert {shape[column] for shape in SHAPES} == set(values)
    assert set(tuning.DECODE) == set(tuning.HEAD_DIMS)
    for has_option in (lambda s: s[5].window, lambda s: s[5].soft_cap, lambda s: s[6]):
        assert {bool(has_option(shape)) for shape in SHAPES} == {False, True}
    every = [*SHAPES, *OTHER_SHAPES]
    assert {s[0] // s[1] for s in every} == set(range(1, tuning.MAX_GROUP + 1))
    assert {s[2:4] for s in every} == set(product(tuning.HEAD_DIMS, tuning.PAGE_SIZES))
    for heads, kv_heads, head_dim, page_size, dtype, _, _ in every:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        assert tuning.supports(**sizes, page_size=page_size, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "supported"),
    [
        ({}, True),
        ({"heads": 28, "kv_heads": 4}, True),
        ({"dtype": "float32"}, False),
        ({"head_dim": 80}, False),
        ({"page_size": 8}, False),
        ({"heads": 34, "kv_heads": 2}, False),
        ({"head_dim": 96, "heads": 3, "kv_heads": 1}, False),
        ({"head_dim": 96, "heads": 3, "kv_heads": 3}, True),
    ],
)
def test_supported_shapes_are_those_with_tiles(changed, supported):
    usual = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    assert tuning.supports(**{**usual, **changed}) is supported


def test_no_kernel_is_chosen_without_a_hopper_gpu():
    assert tuning.hopper_available() is (jax.devices()[0].platform == "gpu")


@pytest.mark.parametrize("head_dim", tuning.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 8, 9, 16])
def test_the_decode_kernel_multiplies_whole_heads_in_pieces_of_64_rows(head_dim, group):
    static = DecodeStatic(
        seqs=3,
        kv_heads=2,
        group=group,
        head_dim=head_dim,
        page_size=16,
        dtype=jnp.bfloat16,
        has_sinks=False,
        spec=PLAIN,
        tiles=tuning.decode_tiles(head_dim, group),
    )
    places = [np.arange(p.start, p.start + p.size) for p in static.pieces]
    assert {len(piece) % parts.WARPGROUP_ROWS for piece in places} == {0}
    assert set(np.concatenate(places)) == set(range(head_dim))
    assert static.part_rows % 8 == 0
    assert group <= static.part_rows < group + 8


@pytest.mark.parametrize(
    ("kv_lens", "is_whole"),
    [
        ([5], True),
        ([0, 64, 65], True),
        ([1000, 0, 3, 129, 0, 0], False),
        ([0], True),
        ([700] * 8, True),
        ([100, 9000], False),
    ],
)
@pytest.mark.parametrize("window", [None, 70])
def test_the_decode_plan_shares_out_every_tile_once(kv_lens, is_whole, window):
    tiles, workers, kv_heads = tuning.decode_tiles(128, group=1), 8, 3
    spec = AttentionSpec(0.1, window=window)
    lens = jnp.asarray(kv_lens, jnp.int32)
    plan = np.asarray(plan_decode(lens, kv_heads=kv_heads, workers=workers, spec=spec, tiles=tiles))
    share, borders = plan[0], plan[1 : 2 + workers]
    first, last, starts = np.split(plan[2 + workers :], [workers, 2 * workers])
    lows = [max(n - window, 0) // 64 if window else 0 for n in kv_lens]
    heads = [-(-n // 64) - low if n else 0 for n, low in zip(kv_lens, lows, strict=True)]
    rows = [n * kv_heads for n in heads]
    assert (borders[0], borders[-1]) == (0, sum(rows))
    loads = np.diff(borders)
    assert loads.min() >= 0
    assert loads.max() <= share + MERGE_COST_TILES
    assert starts.tolist() == [sum(rows[:i]) for i in range(len(rows))]
    begins_of_heads = {
        start + i * n for start, n in zip(starts, heads, strict=True) for i in range(kv_heads + 1)
    }
    if window is None:
        assert set(borders).issubset(begins_of_heads) is is_whole
    for worker in range(workers):
        begin, end = borders[worker], borders[worker + 1]
        mine = [
            row
            for row, (start, n) in enumerate(zip(starts, rows, strict=True))
            if max(begin, start) < min(end, start + n)
        ]
        if mine:
            assert (first[worker], last[worker]) == (mine[0], mine[-1])
        else:
            assert last[worker] < first[worker]


def test_the_mixed_plan_orders_every_run_of_tokens_by_cost():
    q_lens, kv_lens = [40, 1, 0, 70, 1], [300, 1500, 0, 70, 9]
    static = MixedStatic(
        tokens=128,
        seqs=5,
        kv_heads=2,
        group=4,
        head_dim=128,
        page_size=16,
        dtype=jnp.bfloat16,
        has_sinks=False,
        spec=PLAIN,
        tiles=tuning.mixed_tiles(128, tokens=128, seqs=5),
    )
    cu_q_lens = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
    plan = np.asarray(plan_mixed(jnp.asarray(kv_lens, jnp.int32), cu_q_lens, static))
    runs = plan[0]
    rows, firsts = plan[1 : 1 + runs], plan[1 + static.max_runs :][:runs]
    width = static.item_tokens
    expected = {(row, first) for row, n in enumerate(q_lens) for first in range(0, n, width)}
    assert set(zip(rows.tolist(), firsts.tolist(), strict=True)) == expected
    ends = [
        min(kv_lens[row] - q_lens[row] + first + width, kv_lens[row])
        for row, first in zip(rows, firsts, strict=True)
    ]
    costs = [-(-end // static.tiles.block_kv) for end in ends]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("unit", [0.18, 40.0])
def test_a_row_that_sees_nothing_of_its_first_tile_gathers_no_weight(unit):
    logits = jnp.stack([jnp.full(16, parts.HIDDEN), jnp.arange(16.0).at[3].set(parts.HIDDEN)])
    peak, shrink, weights = parts.weigh(logits, unit, jnp.full(2, parts.MASKED))
    assert (peak[0], shrink[0]) == (parts.MASKED, 1.0)
    assert not weights[0].any()
    assert (weights[1, 15], weights[1, 3], peak[1]) == (1.0, 0.0, jnp.float32(15 * unit))


@pytest.mark.gpu
@pytest.mark.parametrize("op", kernels.OPS)
def test_kernels_agree_with_float32_references_on_poisoned_cases(op):
    lines = list(kernels.check(op, 50 if op in product_op.OPS else 15))
    assert sum(line["cases"] for line in lines) >= 200
    assert [line for line in lines if not line["passed"]] == []
