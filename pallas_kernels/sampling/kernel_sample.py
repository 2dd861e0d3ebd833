"""A sample of a row, of which the sampler's kernel takes the logits of some ranks."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import gpu
from jaxtyping import Array, Float

from pallas_kernels.sampling.kernel_parts import (
    SCALAR,
    Static,
    compare,
    const_index,
    f32,
    i32,
    index,
    inline,
    of_type,
    register,
    repeat,
    scalar,
    set_where,
)
from pallas_kernels.sampling.row_search import LOWEST, TRIES

SAMPLE = 256  # logits of a row
LEAST_RANK, USUAL_RANK, MOST_RANK = 4, SAMPLE // 16, SAMPLE // 6  # of the first try
OTHER_RANKS = tuple(SAMPLE * (2 * i + 1) // (2 * TRIES) for i in range(1, TRIES))


def rank_of_first_try(top_k: Float[Array, " rows"], vocab: int) -> Float[Array, " rows"]:
    """From there on, twice as many tokens as top-k wants and a few, or a sixteenth without."""
    of_top_k = jnp.ceil(top_k * (2 * SAMPLE / vocab)) + LEAST_RANK
    return jnp.where(top_k > 0, jnp.minimum(of_top_k, MOST_RANK), USUAL_RANK)


def _shares(static: Static) -> int:
    """Threads that share the ranking of a logit."""
    return static.threads // SAMPLE


def _rank_sample(static: Static, values: Any, ranks: Any) -> None:
    """Into `ranks`, for each part of the sample: how many are larger, and how many not smaller."""
    thread, length = mgpu.thread_idx(), SAMPLE // _shares(static)
    mine = memref.load(values, [index(arith.remui(thread, i32(SAMPLE)))])
    begin = arith.muli(arith.divui(thread, i32(SAMPLE)), i32(length))
    kind = ir.VectorType.get((4,), ir.F32Type.get())

    def rank(i, counts):
        larger, not_smaller = counts
        place = arith.addi(begin, arith.muli(i, i32(4)))
        others = vector.load(kind, values, [index(place)])
        for j in range(4):
            other = vector.extract(others, dynamic_position=[], static_position=[j])
            larger = arith.addf(larger, set_where("gt", other, mine))
            not_smaller = arith.addf(not_smaller, set_where("ge", other, mine))
        return [larger, not_smaller]

    counts = repeat(i32(length // 4), rank, [f32(0), f32(0)])
    for i, number in enumerate(counts):
        memref.store(number, ranks, [const_index(i), index(thread)])


def _choose(static: Static, values: Any, ranks: Any, chosen: Any, wanted: list[Any]) -> None:
    """Into `chosen`, the logits of the wanted ranks."""
    thread = mgpu.thread_idx()
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(SAMPLE))):
        mine = memref.load(values, [index(thread)])
        sums = []
        for i in range(2):
            parts = [
                memref.load(ranks, [const_index(i), index(arith.addi(thread, i32(p * SAMPLE)))])
                for p in range(_shares(static))
            ]
            sums.append(functools.reduce(arith.addf, parts))
        for i, rank in enumerate(wanted):
            is_it = arith.andi(compare("OLE", sums[0], rank), compare("OGT", sums[1], rank))
            with mgpu.when(is_it):  # equals write the same
                memref.store(mine, chosen, [const_index(i)])


def sample_row(
    static: Static, row: jax.Array, needed: jax.Array, first_rank: jax.Array, refs: Any
) -> tuple[list[jax.Array], jax.Array]:
    """The first tries and the best of a sample of the row."""
    stride = static.vocab // SAMPLE

    @inline(
        arg_types=((plgpu.RefType(),) * 4, SCALAR, SCALAR, SCALAR),
        return_type=[of_type(jnp.float32)] * (TRIES + 1),
    )
    def sampled(_, refs, row, needed, first_rank):
        logits, values, ranks, chosen = refs
        thread, first_rank = mgpu.thread_idx(), register(first_rank)
        wanted = [first_rank, *(f32(float(rank)) for rank in OTHER_RANKS), f32(0)]
        with mgpu.when(register(needed)):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(SAMPLE))):
                column = index(arith.muli(thread, i32(stride)))
                x = memref.load(logits, [index(register(row)), column])
                x = arith.select(compare("OGT", x, f32(LOWEST)), x, f32(LOWEST))
                memref.store(x, values, [index(thread)])
            gpu.barrier()
            _rank_sample(static, values, ranks)
            gpu.barrier()
            _choose(static, values, ranks, chosen, wanted)
            gpu.barrier()
        return [scalar(memref.load(chosen, [const_index(i)])) for i in range(TRIES + 1)]

    *tries, best = sampled(refs, row, needed, first_rank)
    return tries, best
