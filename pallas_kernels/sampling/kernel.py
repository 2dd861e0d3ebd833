"""Thresholds of top-k, top-p and min-p as one Mosaic GPU kernel: a program searches a row.

It looks once at the whole row, guided by a sample of it, and holds what may matter in shared
memory, each thread the logits that it saw itself; most rows are settled by looking at these alone.
What lies between two looks is `row_search`, how to look `kernel_look`.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import gpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic import inline
from pallas_kernels.sampling import row_search
from pallas_kernels.sampling.kernel_look import REDUCED, look_at
from pallas_kernels.sampling.kernel_parts import (
    SAMPLE,
    SCALAR,
    WARP,
    SearchStatic,
    as_index,
    as_number,
    as_scalar,
    compared,
    f32,
    i32,
    loop,
    register_of,
    scalar_of,
)
from pallas_kernels.sampling.row_search import LOWEST, TRIES, Asked, Look, Seen
from pallas_kernels.tuning import SearchTiles

MIN_VOCAB = 8192  # of smaller ones a sample says little, and XLA is fast enough
FIRST_RANKS = (4, SAMPLE // 16)  # of the first try, least and most
OTHER_RANKS = tuple(SAMPLE * (2 * i + 1) // 16 for i in range(1, TRIES))


def supports(vocab: int) -> bool:
    """Whether the kernel takes rows of this width."""
    return MIN_VOCAB <= vocab < 2**24  # counts are floats


def _rank_sample(static: SearchStatic, values: Any, ranks: Any) -> None:
    """Into `ranks`, for each part of the sample: how many are larger, and how many not smaller."""
    thread, length = mgpu.thread_idx(), SAMPLE // static.parts
    mine = memref.load(values, [as_index(arith.remui(thread, i32(SAMPLE)))])
    begin = arith.muli(arith.divui(thread, i32(SAMPLE)), i32(length))
    kind = ir.VectorType.get((4,), ir.F32Type.get())

    def compare(i, counts):
        larger, not_smaller = counts
        place = arith.addi(begin, arith.muli(i, i32(4)))
        others = vector.load(kind, values, [as_index(place)])
        for j in range(4):
            other = vector.extract(others, dynamic_position=[], static_position=[j])
            larger = arith.addf(larger, as_number("gt", other, mine))
            not_smaller = arith.addf(not_smaller, as_number("ge", other, mine))
        return [larger, not_smaller]

    counts = loop(i32(length // 4), compare, [f32(0), f32(0)])
    for i, number in enumerate(counts):
        memref.store(number, ranks, [mgpu.c(i, ir.IndexType.get()), as_index(thread)])


def _choose(static: SearchStatic, values: Any, ranks: Any, chosen: Any, wanted: list[Any]) -> None:
    """Into `chosen`, the logits of the wanted ranks."""
    thread, index = mgpu.thread_idx(), ir.IndexType.get()
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(SAMPLE))):
        mine = memref.load(values, [as_index(thread)])
        sums = []
        for i in range(2):
            parts = [
                memref.load(
                    ranks, [mgpu.c(i, index), as_index(arith.addi(thread, i32(p * SAMPLE)))]
                )
                for p in range(static.parts)
            ]
            sums.append(functools.reduce(arith.addf, parts))
        for i, rank in enumerate(wanted):
            is_it = arith.andi(compared("OLE", sums[0], rank), compared("OGT", sums[1], rank))
            with mgpu.when(is_it):  # equals write the same
                memref.store(mine, chosen, [mgpu.c(i, index)])


def _sample(
    static: SearchStatic, row: jax.Array, needed: jax.Array, first_rank: jax.Array, refs: Any
) -> tuple[list[jax.Array], jax.Array]:
    """The first tries and the best of a sample of the row."""
    stride = static.vocab // SAMPLE

    @inline(
        arg_types=((plgpu.RefType(),) * 4, SCALAR, SCALAR, SCALAR),
        return_type=[scalar_of(jnp.float32)] * (TRIES + 1),
    )
    def sampled(_, refs, row, needed, first_rank):
        logits, values, ranks, chosen = refs
        thread, first_rank = mgpu.thread_idx(), register_of(first_rank)
        wanted = [first_rank, *(f32(float(rank)) for rank in OTHER_RANKS), f32(0)]
        with mgpu.when(register_of(needed)):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(SAMPLE))):
                column = as_index(arith.muli(thread, i32(stride)))
                x = memref.load(logits, [as_index(register_of(row)), column])
                x = arith.select(compared("OGT", x, f32(LOWEST)), x, f32(LOWEST))
                memref.store(x, values, [as_index(thread)])
            gpu.barrier()
            _rank_sample(static, values, ranks)
            gpu.barrier()
            _choose(static, values, ranks, chosen, wanted)
            gpu.barrier()
        index = ir.IndexType.get()
        return [as_scalar(memref.load(chosen, [mgpu.c(i, index)])) for i in range(TRIES + 1)]

    *tries, best = sampled(refs, row, needed, first_rank)
    return tries, best


def _load_asked(asked: Any, row: jax.Array) -> tuple[Asked, jax.Array]:
    @inline(arg_types=(plgpu.RefType(), SCALAR), return_type=[scalar_of(jnp.float32)] * 6)
    def load(_, asked, row):
        row, index = as_index(register_of(row)), ir.IndexType.get()
        return [as_scalar(memref.load(asked, [row, mgpu.c(i, index)])) for i in range(6)]

    *numbers, first_rank = load(asked, row)
    return Asked(*numbers), first_rank


def _store(value: jax.Array, out: Any, row: jax.Array) -> None:
    @inline(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def store(_, out, value, row):
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, mgpu.thread_idx(), i32(0))):
            memref.store(register_of(value), out, [as_index(register_of(row))])

    store(out, value, row)


def _find_threshold(static: SearchStatic, refs: tuple[Any, ...]) -> None:
    logits, asked_ref, out, held, sizes, parts, values, ranks, chosen = refs
    row = lax.axis_index("row")
    asked, first_rank = _load_asked(asked_ref, row)
    needed = row_search.filters(asked)
    tries, best = _sample(static, row, needed, first_rank, (logits, values, ranks, chosen))

    def look(look: Look, num_looks: Int32[Array, ""]) -> Seen:
        return look_at(static, look, asked.scale, row, num_looks % 2, (logits, held, sizes, parts))

    _store(row_search.find_threshold(asked, tuple(tries), best, look), out, row)


def find_thresholds_kernel(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    tiles: SearchTiles,
) -> Float[Array, " rows"]:
    """The least logit that each row keeps, -inf where it keeps all."""
    rows, vocab = logits.shape
    static = SearchStatic(vocab, tiles)
    top_k = jnp.where(top_k < vocab, top_k, 0).astype(jnp.float32)
    # of the first try on there should be twice as many tokens as top-k wants, and a few
    least, most = FIRST_RANKS
    first_rank = jnp.where(top_k > 0, jnp.ceil(top_k * (2 * SAMPLE / vocab)) + least, most)
    first_rank = jnp.minimum(first_rank, most)
    scale = math.log2(math.e) / temperature
    asked = (scale, top_k, top_p, min_p, temperature * jnp.log(min_p), first_rank)

    def body(*refs):
        _find_threshold(static, refs)

    threads = static.threads
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        scratch_types=[
            plgpu.SMEM((tiles.held * threads,), jnp.float32),
            plgpu.SMEM((threads,), jnp.int32),
            plgpu.SMEM((2 * REDUCED, WARP), jnp.float32),
            plgpu.SMEM((SAMPLE,), jnp.float32),
            plgpu.SMEM((2, threads), jnp.float32),
            plgpu.SMEM((TRIES + 1,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("row",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )(logits, jnp.stack(asked, axis=1))
