"""Thresholds of top-k, top-p and min-p as one Mosaic GPU kernel: a program searches a row.

It looks once at the whole row, guided by a sample of it, and holds what may matter in shared
memory, each thread the logits that it saw itself; most rows are settled by looking at these alone.
What lies between two looks is `row_search`, how to look `kernel_look`.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir.dialects import arith, memref
from jaxlib.mlir.dialects import gpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.sampling import row_search
from pallas_kernels.sampling.kernel_look import PARTS, look_around, seen_by_all
from pallas_kernels.sampling.kernel_parts import (
    SCALAR,
    WARP,
    Static,
    const_index,
    i32,
    index,
    inline,
    of_type,
    register,
    scalar,
)
from pallas_kernels.sampling.kernel_sample import SAMPLE, rank_of_first_try, sample_row
from pallas_kernels.sampling.row_search import TRIES, Asked
from pallas_kernels.tuning import SearchTiles

MIN_VOCAB = 8192  # of smaller ones a sample says little, and XLA is fast enough
NUMBERS = 64  # room for those of a state


def supports(vocab: int) -> bool:
    """Whether the kernel takes rows of this width."""
    return MIN_VOCAB <= vocab < 2**24  # counts are floats


def _load(ref: Any, like: Any) -> Any:
    """A tree of numbers from shared memory."""
    leaves, tree = jax.tree.flatten(like)

    @inline(arg_types=(plgpu.RefType(),), return_type=[of_type(jnp.float32)] * len(leaves))
    def load(_, ref):
        return [scalar(memref.load(ref, [const_index(i)])) for i in range(len(leaves))]

    loaded = zip(load(ref), leaves, strict=True)
    return tree.unflatten([x > 0 if leaf.dtype == jnp.bool_ else x for x, leaf in loaded])


def _store(ref: Any, numbers: Any) -> None:
    """A tree of numbers into shared memory, by the first thread."""
    leaves = [
        jnp.where(leaf, 1.0, 0.0) if leaf.dtype == jnp.bool_ else leaf
        for leaf in jax.tree.leaves(numbers)
    ]

    @inline(arg_types=(plgpu.RefType(), (SCALAR,) * len(leaves)))
    def store(_, ref, leaves):
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, mgpu.thread_idx(), i32(0))):
            for i, leaf in enumerate(leaves):
                memref.store(register(leaf), ref, [const_index(i)])

    store(ref, tuple(leaves))


def _is_first_warp() -> jax.Array:
    @inline(return_type=of_type(jnp.bool_))
    def is_first(_):
        return scalar(arith.cmpi(arith.CmpIPredicate.ult, mgpu.thread_idx(), i32(WARP)))

    return is_first()


def _wait_for_all() -> None:
    @inline()
    def wait(_):
        gpu.barrier()

    wait()


def _load_asked(asked: Any, row: jax.Array) -> tuple[Asked, jax.Array]:
    @inline(arg_types=(plgpu.RefType(), SCALAR), return_type=[of_type(jnp.float32)] * 6)
    def load(_, asked, row):
        row = index(register(row))
        return [scalar(memref.load(asked, [row, const_index(i)])) for i in range(6)]

    *numbers, first_rank = load(asked, row)
    return Asked(*numbers), first_rank


def _find_threshold(static: Static, refs: tuple[Any, ...]) -> None:
    logits, asked_ref, out, held, sizes, parts, values, ranks, chosen, numbers = refs
    row = lax.axis_index("row")
    asked, first_rank = _load_asked(asked_ref, row)
    needed = row_search.filters(asked)
    tries, best = sample_row(static, row, needed, first_rank, (logits, values, ranks, chosen))
    begun = (asked, row_search.begin(asked, tuple(tries), best))
    _store(numbers, begun)

    def look(_: Any) -> jax.Array:
        asked, state = _load(numbers, begun)
        look_around(static, state.look, asked.scale, row, (logits, held, sizes, parts))
        _wait_for_all()

        @pl.when(_is_first_warp())
        def _():
            # by one warp: the others would only take its time
            _store(numbers, (asked, row_search.conclude(asked, state, seen_by_all(static, parts))))

        _wait_for_all()
        return _load(numbers, begun)[1].is_done

    _wait_for_all()
    lax.while_loop(lambda is_done: ~is_done, look, ~needed)
    asked, state = _load(numbers, begun)
    _store(out.at[pl.ds(row, 1)], row_search.threshold(asked, state.look.low))


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
    static = Static(vocab, tiles)
    top_k = jnp.where(top_k < vocab, top_k, 0).astype(jnp.float32)
    scale = math.log2(math.e) / temperature
    asked = (scale, top_k, top_p, min_p, temperature * jnp.log(min_p))

    def body(*refs):
        _find_threshold(static, refs)

    threads = static.threads
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        scratch_types=[
            plgpu.SMEM((static.room,), jnp.float32),
            plgpu.SMEM((threads,), jnp.int32),
            plgpu.SMEM(PARTS, jnp.float32),
            plgpu.SMEM((SAMPLE,), jnp.float32),
            plgpu.SMEM((2, threads), jnp.float32),
            plgpu.SMEM((TRIES + 1,), jnp.float32),
            plgpu.SMEM((NUMBERS,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("row",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # single numbers may differ between the threads of a warpgroup
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )(logits, jnp.stack((*asked, rank_of_first_try(top_k, vocab)), axis=1))
