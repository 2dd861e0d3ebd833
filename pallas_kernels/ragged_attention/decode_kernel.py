"""Decode attention on Hopper: one query a row, KV read through the page table at memory speed.

The work is one long line of KV tiles: row after row, in a row KV head after KV head. Each pair of
warpgroups (one loads, one computes) gets an about equal stretch of the line, so a head of a row may
lie on several pairs. The pair that has the beginning of such a head owns it: the others leave their
part in global memory, and the owner takes the parts in as if they were values with known logits.
A pair works on a part that it does not own first, and on one that it must wait for last.

The tokens of a tile are the 64 rows of the tensor cores' products, and the heads of a group the
columns, eight or sixteen: S^T = K Q^T, O^T = V^T P^T. With the heads as rows, at least three
quarters of each product would be of rows that nobody asks for.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import tuning
from pallas_kernels.mosaic import tiled
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.decode_load import DecodeRefs, DecodeScratch, load_decode
from pallas_kernels.ragged_attention.decode_plan import (
    DecodeStatic,
    Segment,
    count_merge_tiles,
    for_each_segment,
    plan_decode,
)
from pallas_kernels.ragged_attention.decode_softmax import (
    Pieces,
    Softmax,
    add_values,
    empty_pieces,
    empty_softmax,
    finish_softmax,
    scratch_size,
    shrink_softmax,
    store_turned,
    turned,
)
from pallas_kernels.spec import AttentionSpec


def _store_out(smem: Any, values: Pieces) -> None:
    """Where the copy engine takes results from, once the copies before have been read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, piece in enumerate(values):
        store_turned(smem.out.at[smem.pair, i], piece)
    plgpu.commit_smem()


def _copy_out(static: DecodeStatic, smem: Any, rows: int, target: Any) -> None:
    """The first rows of the results [part_rows, head_dim] to global memory [rows, head_dim]."""
    for i, piece in enumerate(static.pieces):
        source = smem.out.at[smem.pair, i, pl.ds(0, rows)]
        plgpu.copy_smem_to_gmem(source, target.at[:, piece])


def _attend_tile(
    static: DecodeStatic,
    smem: Any,
    segment: Segment,
    i: jax.Array,
    tile: jax.Array,
    softmax: Softmax,
) -> Softmax:
    """Take in tile `i` of the segment, the worker's `tile`-th."""
    s, block, me = static, static.tiles.block_kv, smem.pair
    k_slot, v_slot = smem.slot(tile, s.tiles.k_stages), smem.slot(tile, s.tiles.v_stages)
    shape = (block, s.part_rows)
    plgpu.barrier_wait(smem.k_full.at[k_slot])
    logits = parts.multiply(smem.k.at[k_slot], turned(smem.q_tiled.at[me]), shape)
    plgpu.barrier_arrive(smem.k_free.at[k_slot])

    start = (segment.first_tile + i) * block
    low, high = parts.first_visible(segment.kv_len, s.spec) - start, segment.kv_len - start
    place = parts.iota(shape, 0)
    visible = place < high if s.spec.window is None else (place < high) & (place >= low)
    logits = jnp.where(visible, parts.log2_weights(logits, s.spec), 2 * parts.MASKED)
    (acc, peak, mass), weights = shrink_softmax(softmax, logits, smem.scratch.at[me])
    store_turned(smem.weights.at[2 * me], weights.astype(s.dtype))
    plgpu.commit_smem()

    plgpu.barrier_wait(smem.v_full.at[v_slot])
    values = smem.v.at[v_slot]
    pl.when((high < block) | (low > 0))(lambda: parts.zero_rows_outside(values, low, high))
    acc = add_values(s, acc, (values, smem.weights.at[2 * me]))
    plgpu.barrier_arrive(smem.v_free.at[v_slot])
    return acc, peak, mass


def _merge_tile(
    static: DecodeStatic,
    smem: Any,
    segment: Segment,
    i: jax.Array,
    tile: jax.Array,
    softmax: Softmax,
) -> Softmax:
    """Take in a tile of other workers' parts: rows of values, whose logits are their log sums.

    Parts and weights come as a sum of two 16-bit halves, which keeps 16 bits or more of each.
    """
    s, block, me = static, static.tiles.block_kv, smem.pair
    k_slot, v_slot = smem.slot(tile, s.tiles.k_stages), smem.slot(tile, s.tiles.v_stages)
    high_half, low_half = smem.k.at[k_slot], smem.v.at[v_slot]
    plgpu.barrier_wait(smem.k_full.at[k_slot])
    plgpu.barrier_wait(smem.v_full.at[v_slot])
    rows_left = segment.parts * s.part_rows - i * block

    @pl.when(rows_left < block)
    def _():
        for half in (high_half, low_half):
            parts.zero_rows_outside(half, jnp.int32(0), rows_left)

    # by the copy engine as well: an ordinary load might find an old line in the L1 cache
    plgpu.barrier_wait(smem.merge_full.at[me])
    part_logits = plgpu.load(smem.logits.at[s.tiles.pairs + me], layout=parts.ROWS)
    plgpu.barrier_arrive(smem.merge_free.at[me])
    shape = (block, s.part_rows)
    part, query = parts.iota(shape, 0), parts.iota(shape, 1)
    same_query = (part & (s.part_rows - 1)) == query
    logits = parts.across_columns(part_logits, s.part_rows)
    logits = jnp.where(same_query & (part < rows_left), logits, 2 * parts.MASKED)
    (acc, peak, mass), weights = shrink_softmax(softmax, logits, smem.scratch.at[me])
    rough = weights.astype(s.dtype)
    rest = (weights - rough.astype(jnp.float32)).astype(s.dtype)
    store_turned(smem.weights.at[2 * me], rough)
    store_turned(smem.weights.at[2 * me + 1], rest)
    plgpu.commit_smem()
    rough, rest = smem.weights.at[2 * me], smem.weights.at[2 * me + 1]
    acc = add_values(s, acc, (high_half, rough), (low_half, rough), (high_half, rest))
    plgpu.barrier_arrive(smem.k_free.at[k_slot])
    plgpu.barrier_arrive(smem.v_free.at[v_slot])
    return acc, peak, mass


def _store_part(
    static: DecodeStatic,
    refs: Any,
    smem: Any,
    worker: jax.Array,
    segment: Segment,
    softmax: Softmax,
) -> None:
    me = smem.pair
    values, log_sums = finish_softmax(softmax, smem.scratch.at[smem.pair])
    # columns past the group hold other heads, or another row, whose NaN would spread when merged
    values = [jnp.where(parts.iota(piece.shape, 1) < static.group, piece, 0.0) for piece in values]
    high = tuple(piece.astype(static.dtype) for piece in values)
    low = tuple(
        (piece - rounded.astype(jnp.float32)).astype(static.dtype)
        for piece, rounded in zip(values, high, strict=True)
    )
    place = pl.ds(worker * static.part_rows, static.part_rows)
    own_logits = smem.logits.at[me, pl.ds(0, static.part_rows)]
    own_logits[...] = log_sums
    for half, ref in ((high, refs.part_high), (low, refs.part_low)):
        _store_out(smem, half)
        _copy_out(static, smem, static.part_rows, ref.at[place])
    plgpu.copy_smem_to_gmem(own_logits, refs.part_logits.at[place])
    plgpu.wait_smem_to_gmem(0)
    parts.fence_copy_engine()
    plgpu.semaphore_signal(refs.parts_ready.at[segment.owner], memory_scope="gpu")


def _compute(static: DecodeStatic, refs: Any, smem: Any, worker: jax.Array) -> None:
    s, me = static, smem.pair
    plgpu.barrier_arrive(smem.q_free.at[me])
    _zero_padding_rows(s, refs, smem, worker)

    def visit(segment, tiles_before):
        plgpu.barrier_wait(smem.q_full.at[me])
        # a copy into tiles would have to begin at a multiple of eight heads
        for i, piece in enumerate(s.pieces):
            query, layout = turned(smem.q.at[me, i]), plgpu.Layout.WGMMA_TRANSPOSED
            query = plgpu.load(query, layout=layout, optimized=False)
            turned(smem.q_tiled.at[me, :, piece])[...] = query
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.q_free.at[me])
        softmax = _first_softmax(s, refs, segment)

        def attend(i, softmax):
            tile = tiles_before + i - segment.begin
            return _attend_tile(s, smem, segment, i, tile, softmax)

        softmax = lax.fori_loop(segment.begin, segment.end, attend, softmax)
        tiles_after = tiles_before + segment.end - segment.begin
        merge_tiles = count_merge_tiles(s, segment)

        def merge(i, softmax):
            return _merge_tile(s, smem, segment, i, tiles_after + i, softmax)

        softmax = lax.fori_loop(0, merge_tiles, merge, softmax)
        owns = segment.begin == 0
        pl.when(owns)(lambda: _store_head(s, refs, smem, segment, softmax))
        pl.when(~owns)(lambda: _store_part(s, refs, smem, worker, segment, softmax))
        return tiles_after + merge_tiles

    for_each_segment(s, refs.plan, refs.lens, worker, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _first_softmax(static: DecodeStatic, refs: Any, segment: Segment) -> Softmax:
    s, (acc, peak, mass) = static, empty_softmax(static)
    if s.has_sinks:  # they count once, with the owner
        sinks = refs.sinks.at[segment.head, pl.ds(0, s.part_rows)]
        sinks = plgpu.load(sinks, layout=parts.COLUMNS, optimized=False)
        owner = jnp.where(segment.begin == 0, 1.0, 0.0)
        peak = sinks * owner + peak * (1.0 - owner)
        mass = jnp.where(parts.iota(mass.shape, 0) == 0, owner, 0.0)
    return acc, peak, mass


def _store_head(
    static: DecodeStatic, refs: Any, smem: Any, segment: Segment, softmax: Softmax
) -> None:
    values, _ = finish_softmax(softmax, smem.scratch.at[smem.pair])
    _store_out(smem, tuple(piece.astype(static.dtype) for piece in values))
    _copy_out(static, smem, static.group, refs.out.at[segment.row, segment.head])


def _zero_padding_rows(static: DecodeStatic, refs: Any, smem: Any, worker: jax.Array) -> None:
    _store_out(smem, tuple(piece.astype(static.dtype) for piece in empty_pieces(static)))

    def visit(i, _):
        row = worker + i * static.workers

        @pl.when(refs.lens[row] == 0)
        def _():
            for head in range(static.kv_heads):
                _copy_out(static, smem, static.group, refs.out.at[row, head])

    rows = lax.div(static.seqs - worker + (static.workers - 1), jnp.int32(static.workers))
    lax.fori_loop(0, rows, visit, None)


def _scratch_types(static: DecodeStatic) -> list[Any]:
    s, t = static, static.tiles
    transforms = tiled(s.head_dim)
    copies, _ = parts.copies_of_tile(t.block_kv, s.page_size)
    pieces = plgpu.SMEM((t.pairs, len(s.pieces), s.part_rows, s.piece), s.dtype)
    weights = (2 * t.pairs, s.part_rows, t.block_kv)
    return [
        pieces,
        plgpu.SMEM((t.pairs, s.part_rows, s.head_dim), s.dtype, transforms=transforms),
        plgpu.SMEM((t.pairs * t.k_stages, t.block_kv, s.head_dim), s.dtype, transforms=transforms),
        plgpu.SMEM((t.pairs * t.v_stages, t.block_kv, s.head_dim), s.dtype, transforms=transforms),
        plgpu.SMEM(weights, s.dtype, transforms=transforms),  # as V has: the products ask for it
        plgpu.SMEM((t.pairs, scratch_size(s)), jnp.float32),
        pieces,
        plgpu.SMEM((2 * t.pairs, t.block_kv), jnp.float32),
        plgpu.Barrier(num_arrivals=len(s.pieces), num_barriers=t.pairs),
        plgpu.Barrier(num_barriers=t.pairs),
        plgpu.Barrier(num_arrivals=copies, num_barriers=t.pairs * t.k_stages),
        plgpu.Barrier(num_barriers=t.pairs * t.k_stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=t.pairs * t.v_stages),
        plgpu.Barrier(num_barriers=t.pairs * t.v_stages),
        plgpu.Barrier(num_barriers=t.pairs),
        plgpu.Barrier(num_barriers=t.pairs),
    ]


def decode_attention(
    q: Float[Array, "seqs heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    kv_lens: Int32[Array, " seqs"],
    sinks: Float[Array, " heads"] | None,
    *,
    spec: AttentionSpec,
) -> Float[Array, "seqs heads head_dim"]:
    """The op's contract for rows of one query each; rows with `kv_len` 0 give zeros.

    Shapes and types must pass `tuning.supports`. Weights and values are multiplied in q's type and
    summed in float32.
    """
    seqs, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    static = DecodeStatic(
        seqs=seqs,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=q.dtype,
        has_sinks=sinks is not None,
        spec=spec,
        tiles=tuning.decode_tiles(head_dim, heads // kv_heads),
    )
    t = static.tiles
    plan = plan_decode(kv_lens, kv_heads=kv_heads, workers=static.workers, spec=spec, tiles=t)

    def decode(*refs):
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, refs, scratch),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    places = static.part_places
    out, *_ = plgpu.kernel(
        decode,
        out_type=[
            jax.ShapeDtypeStruct((seqs, kv_heads, static.group, head_dim), q.dtype),
            jax.ShapeDtypeStruct((places, head_dim), q.dtype),
            jax.ShapeDtypeStruct((places, head_dim), q.dtype),
            jax.ShapeDtypeStruct((places,), jnp.float32),
        ],
        grid=(tuning.MULTIPROCESSORS,),
        grid_names=("program",),
        num_threads=2 * t.pairs,
        thread_name="warpgroup",
        compiler_params=parts.compiler_params(auto_barriers=True),
    )(
        q.reshape(seqs * heads, head_dim),
        k_pages,
        v_pages,
        page_table,
        kv_lens,
        plan,
        *parts.sink_rows(sinks, kv_heads, static.group),
    )
    return out.reshape(seqs, heads, head_dim)


def _run_warpgroup(static: DecodeStatic, refs: tuple[Any, ...], scratch: tuple[Any, ...]) -> None:
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.div(warpgroup, jnp.int32(2))
    worker = lax.axis_index("program") * static.tiles.pairs + pair
    semaphores = plgpu.SemaphoreType.REGULAR((static.workers,))
    ready = pl.get_global(semaphores)
    make_refs: Any = DecodeRefs
    arrays = make_refs(*refs[:6], *parts.fill_sinks(static.has_sinks, refs[6:]), ready)
    make_scratch: Any = DecodeScratch
    smem = make_scratch(pair, *scratch)

    @pl.when(lax.rem(warpgroup, jnp.int32(2)) == 0)
    def _():
        plgpu.set_max_registers(200 if static.tiles.pairs == 2 else 232, action="increase")
        _compute(static, arrays, smem, worker)

    @pl.when(lax.rem(warpgroup, jnp.int32(2)) == 1)
    def _():
        plgpu.set_max_registers(56, action="decrease")
        load_decode(static, arrays, smem, worker)
