"""Decode attention on Hopper: one query a row, KV read through the page table at memory speed.

The work is one long line of KV tiles: row after row, in a row KV head after KV head. Each pair of
warpgroups (one loads, one computes) gets an about equal stretch of the line, so a head of a row may
lie on several pairs. The pair that has the beginning of such a head owns it: the others leave their
part in global memory, and the owner takes the parts in as if they were values with known logits.
A pair works on a part that it does not own first, and on one that it must wait for last.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import tuning
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.decode_load import DecodeRefs, DecodeScratch, load_decode
from pallas_kernels.ragged_attention.decode_plan import (
    DecodeStatic,
    Segment,
    count_merge_tiles,
    for_each_segment,
    plan_decode,
)
from pallas_kernels.spec import AttentionSpec


def _attend_tile(
    static: DecodeStatic,
    smem: Any,
    query: Any,
    segment: Segment,
    i: jax.Array,
    tile: jax.Array,
    softmax: parts.Softmax,
) -> parts.Softmax:
    """Take in tile `i` of the segment, the worker's `tile`-th."""
    s, block = static, static.tiles.block_kv
    k_slot, v_slot = smem.slot(tile, s.tiles.k_stages), smem.slot(tile, s.tiles.v_stages)
    shape = (parts.WARPGROUP_ROWS, block)
    plgpu.barrier_wait(smem.k_full.at[k_slot])
    logits = parts.multiply(query, smem.k.at[k_slot].transpose((1, 0)), shape)
    plgpu.barrier_arrive(smem.k_free.at[k_slot])

    start = (segment.first_tile + i) * block
    low, high = parts.first_visible(segment.kv_len, s.spec) - start, segment.kv_len - start
    place = parts.iota(shape, 1)
    visible = place < high if s.spec.window is None else (place < high) & (place >= low)
    # rows without a query get weights of 0, below any peak: zeros take the least power to multiply
    visible &= parts.iota(shape, 0) < s.part_rows
    logits = jnp.where(visible, parts.log2_weights(logits, s.spec), 2 * parts.MASKED)
    (acc, peak, mass), weights = parts.shrink_softmax(softmax, logits)
    weights = weights.astype(s.dtype)

    plgpu.barrier_wait(smem.v_full.at[v_slot])
    values = smem.v.at[v_slot]
    pl.when((high < block) | (low > 0))(lambda: parts.zero_rows_outside(values, low, high))
    acc = parts.add_products(acc, (weights, values))
    plgpu.barrier_arrive(smem.v_free.at[v_slot])
    return acc, peak, mass


def _merge_tile(
    static: DecodeStatic,
    smem: Any,
    segment: Segment,
    i: jax.Array,
    tile: jax.Array,
    softmax: parts.Softmax,
) -> parts.Softmax:
    """Take in a tile of other workers' parts: rows of values, whose logits are their log sums.

    Parts and weights come as a sum of two 16-bit halves, which keeps 16 bits or more of each.
    """
    s, block = static, static.tiles.block_kv
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
    plgpu.barrier_wait(smem.merge_full.at[smem.pair])
    part_logits = plgpu.load(smem.logits.at[static.tiles.pairs + smem.pair], layout=parts.COLUMNS)
    plgpu.barrier_arrive(smem.merge_free.at[smem.pair])
    shape = (parts.WARPGROUP_ROWS, block)
    query, part = parts.iota(shape, 0), parts.iota(shape, 1)
    same_query = (query & (s.part_rows - 1)) == (part & (s.part_rows - 1))
    logits = parts.across_rows(part_logits, parts.WARPGROUP_ROWS)
    logits = jnp.where(same_query & (part < rows_left), logits, parts.MASKED)
    (acc, peak, mass), weights = parts.shrink_softmax(softmax, logits)
    rough = weights.astype(s.dtype)
    rest = (weights - rough.astype(jnp.float32)).astype(s.dtype)
    acc = parts.add_products(acc, (rough, high_half), (rough, low_half), (rest, high_half))
    plgpu.barrier_arrive(smem.k_free.at[k_slot])
    plgpu.barrier_arrive(smem.v_free.at[v_slot])
    return acc, peak, mass


def _store_part(
    static: DecodeStatic,
    refs: Any,
    smem: Any,
    worker: jax.Array,
    segment: Segment,
    softmax: parts.Softmax,
) -> None:
    acc, peak, mass = softmax
    values = acc * parts.across_columns(1.0 / mass, static.head_dim)
    high = values.astype(static.dtype)
    low = (values - high.astype(jnp.float32)).astype(static.dtype)
    rows = pl.ds(0, static.part_rows)
    place = pl.ds(worker * static.part_rows, static.part_rows)
    for half, ref in ((high, refs.part_high), (low, refs.part_low)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[smem.pair][...] = half
        if ref is refs.part_high:
            smem.logits.at[smem.pair][...] = peak + jnp.log2(mass)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[smem.pair, rows], ref.at[place])
    plgpu.copy_smem_to_gmem(smem.logits.at[smem.pair, rows], refs.part_logits.at[place])
    plgpu.wait_smem_to_gmem(0)
    parts.fence_copy_engine()
    plgpu.semaphore_signal(refs.parts_ready.at[segment.owner], memory_scope="gpu")


def _compute(static: DecodeStatic, refs: Any, smem: Any, worker: jax.Array) -> None:
    s = static
    zeros = parts.filled(0.0, s.head_dim).astype(s.dtype)
    smem.q.at[smem.pair][...] = zeros  # only part_rows are loaded
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.q_free.at[smem.pair])
    _zero_padding_rows(s, refs, smem, worker)

    def visit(segment, tiles_before):
        plgpu.barrier_wait(smem.q_full.at[smem.pair])
        query = plgpu.load(smem.q.at[smem.pair], layout=plgpu.Layout.WGMMA, optimized=False)
        if not s.tiles.q_in_registers:
            smem.q_tiled.at[smem.pair][...] = query
            plgpu.commit_smem()
            query = smem.q_tiled.at[smem.pair]
        plgpu.barrier_arrive(smem.q_free.at[smem.pair])
        softmax = parts.empty_softmax(s.head_dim)
        if s.has_sinks:  # they count once, with the owner
            sinks = plgpu.load(refs.sinks.at[segment.head], layout=parts.ROWS, optimized=False)
            owner = jnp.where(segment.begin == 0, 1.0, 0.0)
            peak = sinks * owner + parts.MASKED * (1.0 - owner)
            softmax = softmax[0], peak, parts.filled_rows(0.0) + owner

        def attend(i, softmax):
            tile = tiles_before + i - segment.begin
            return _attend_tile(s, smem, query, segment, i, tile, softmax)

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


def _store_head(
    static: DecodeStatic, refs: Any, smem: Any, segment: Segment, softmax: parts.Softmax
) -> None:
    acc, _, mass = softmax
    values = acc * parts.across_columns(1.0 / mass, static.head_dim)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.out.at[smem.pair][...] = values.astype(static.dtype)
    plgpu.commit_smem()
    rows = smem.out.at[smem.pair, pl.ds(0, static.group)]
    plgpu.copy_smem_to_gmem(rows, refs.out.at[segment.row, segment.head])


def _zero_padding_rows(static: DecodeStatic, refs: Any, smem: Any, worker: jax.Array) -> None:
    smem.out.at[smem.pair][...] = parts.filled(0.0, static.head_dim).astype(static.dtype)
    plgpu.commit_smem()

    def visit(i, _):
        row = worker + i * static.workers

        @pl.when(refs.lens[row] == 0)
        def _():
            for head in range(static.kv_heads):
                plgpu.copy_smem_to_gmem(
                    smem.out.at[smem.pair, pl.ds(0, static.group)], refs.out.at[row, head]
                )

    rows = lax.div(static.seqs - worker + (static.workers - 1), jnp.int32(static.workers))
    lax.fori_loop(0, rows, visit, None)


def _scratch_types(static: DecodeStatic) -> list[Any]:
    s, t = static, static.tiles
    tiled = parts.tiled(s.head_dim)
    copies, _ = parts.copies_of_tile(t.block_kv, s.page_size)
    rows = parts.WARPGROUP_ROWS
    query = (t.pairs, rows, s.head_dim)
    return [
        plgpu.SMEM(query, s.dtype),
        None if t.q_in_registers else plgpu.SMEM(query, s.dtype, transforms=tiled),
        plgpu.SMEM((t.pairs * t.k_stages, t.block_kv, s.head_dim), s.dtype, transforms=tiled),
        plgpu.SMEM((t.pairs * t.v_stages, t.block_kv, s.head_dim), s.dtype, transforms=tiled),
        plgpu.SMEM((t.pairs, rows, s.head_dim), s.dtype),
        plgpu.SMEM((2 * t.pairs, rows), jnp.float32),
        plgpu.Barrier(num_barriers=t.pairs),
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
        tiles=tuning.decode_tiles(head_dim),
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
