"""Decode attention on Hopper: one query a row, KV read through the page table at memory speed.

The work is one long line of KV tiles: row after row, in a row KV head after KV head. Each pair of
warpgroups (one loads, one computes) gets an equal stretch of the line, so a head of a row may lie
on several pairs. The pair that has the beginning of such a head owns it: the others leave their
part in global memory, and the owner takes the parts in as if they were values with known logits.
A pair works on a part that it does not own first, and on one that it must wait for last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import tuning
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.spec import AttentionSpec


@dataclass(frozen=True)
class _Static:
    """Everything known when the kernel is traced."""

    seqs: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: Any
    has_sinks: bool
    spec: AttentionSpec
    tiles: tuning.DecodeTiles

    @property
    def workers(self) -> int:
        return tuning.MULTIPROCESSORS * self.tiles.pairs

    @property
    def part_rows(self) -> int:
        """Rows of q really loaded and of a part really stored: the group, padded."""
        return 8 if self.group <= 8 else 16

    @property
    def part_places(self) -> int:
        """Rows of the array of parts; a tile read at its end must stay inside."""
        return self.workers * self.part_rows + self.tiles.block_kv


@dataclass(frozen=True)
class _Segment:
    """A worker's stretch of the tiles of one row and KV head. Tiles count from the first visible."""

    row: jax.Array
    head: jax.Array
    kv_len: jax.Array
    first_tile: jax.Array
    begin: jax.Array
    end: jax.Array
    tiles: jax.Array  # of the whole head
    parts: jax.Array  # workers after this one that have a part of this head


@dataclass(frozen=True)
class _GlobalRefs:
    """Arrays in global memory. A part is one worker's share of a head that another one owns."""

    q: Any  # [seqs * heads, head_dim]
    k_pages: Any
    v_pages: Any
    table: Any
    lens: Any
    plan: Any
    sinks: Any  # [kv_heads, WARPGROUP_ROWS], log2; unread without sinks
    out: Any  # [seqs, kv_heads, group, head_dim]
    part_high: Any  # [part_places, head_dim]: rounded values of the parts,
    part_low: Any  # and what the rounding left
    part_logits: Any  # [part_places]: log2 of the sum of each row's weights
    part_ready: Any  # a semaphore a worker


@dataclass(frozen=True)
class _Scratch:
    """One pair's view of shared memory and barriers; every first dimension counts pairs."""

    pair: jax.Array
    q: Any
    q_tiled: Any
    k: Any  # first dimension pairs * k_stages, as in k_full and k_free
    v: Any
    out: Any
    part_logits: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any

    def slot(self, tile: jax.Array, stages: int) -> jax.Array:
        return self.pair * stages + lax.rem(tile, jnp.int32(stages))


def plan_decode(
    kv_lens: Int32[Array, " seqs"],
    *,
    kv_heads: int,
    workers: int,
    spec: AttentionSpec,
    tiles: tuning.DecodeTiles,
) -> Int32[Array, " words"]:
    """Share the line of tiles out among the workers.

    Words: tiles a worker, all tiles, first row of each worker, last row of each worker (less than
    the first if it has no work), place of each row in the line.
    """
    block = jnp.int32(tiles.block_kv)
    first = lax.div(parts.first_visible(kv_lens, spec), block)
    row_tiles = jnp.where(kv_lens > 0, lax.div(kv_lens + (block - 1), block) - first, 0) * kv_heads
    row = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    before = row[None, :] < row[:, None]
    starts = jnp.sum(jnp.where(before, row_tiles[None, :], 0), axis=1, dtype=jnp.int32)
    total = jnp.sum(row_tiles, dtype=jnp.int32)
    share = jnp.maximum(lax.div(total + (workers - 1), jnp.int32(workers)), tiles.min_tiles)
    worker_start = jnp.arange(workers, dtype=jnp.int32) * share
    begun = starts[None, :] < worker_start[:, None] + share
    over = starts[None, :] + row_tiles[None, :] <= worker_start[:, None]
    first_row = jnp.sum(over, axis=1, dtype=jnp.int32)
    has_work = begun & (row_tiles > 0)[None, :]
    last_row = jnp.max(jnp.where(has_work, row[None, :], -1), axis=1)
    return jnp.concatenate([share[None], total[None], first_row, last_row, starts])


def _for_each_segment(
    static: _Static, plan_ref: Any, lens_ref: Any, worker: jax.Array, visit: Callable, carry: Any
) -> Any:
    workers, block = static.workers, jnp.int32(static.tiles.block_kv)
    share, total = plan_ref[0], plan_ref[1]
    begin = worker * share
    end = jnp.minimum(begin + share, total)

    def visit_row(row, carry):
        start, kv_len = plan_ref[2 + 2 * workers + row], lens_ref[row]
        first_tile = lax.div(parts.first_visible(kv_len, static.spec), block)
        tiles = lax.div(kv_len + (block - 1), block) - first_tile
        low = jnp.maximum(begin - start, 0)
        high = jnp.minimum(end - start, tiles * static.kv_heads)
        tiles = jnp.maximum(tiles, 1)  # a row without KV has no heads to visit

        def visit_head(head, carry):
            here = head * tiles
            last_part = lax.div(start + here + tiles - 1, share)
            segment = _Segment(
                row=row,
                head=head,
                kv_len=kv_len,
                first_tile=first_tile,
                begin=jnp.maximum(low - here, 0),
                end=jnp.minimum(high - here, tiles),
                tiles=tiles,
                parts=last_part - worker,
            )
            return visit(segment, carry)

        first_head = lax.div(low, tiles)
        last_head = jnp.where(high > low, lax.div(high - 1, tiles), -1)
        return lax.fori_loop(first_head, last_head + 1, visit_head, carry)

    return lax.fori_loop(plan_ref[2 + worker], plan_ref[2 + workers + worker] + 1, visit_row, carry)


def _merge_tiles(static: _Static, segment: _Segment) -> jax.Array:
    """Tiles of parts that the owner of this segment must take in."""
    rows = segment.parts * static.part_rows
    block = jnp.int32(static.tiles.block_kv)
    owns = (segment.begin == 0) & (segment.end < segment.tiles)
    return jnp.where(owns, lax.div(rows + (block - 1), block), 0)


def _load(static: _Static, refs: Any, smem: Any, worker: jax.Array) -> None:
    """The loading warpgroup: runs ahead of the computing one, into the next segments too."""
    s, tiles = static, static.tiles
    copies, copy_rows = parts.copies_of_tile(tiles.block_kv, s.page_size)
    tile_parts = tiles.block_kv // s.part_rows

    def fill(ring, stages, tile, sources):
        ref, full, free = ring
        slot = smem.slot(tile, stages)
        pl.when(tile >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        for i, source in enumerate(sources):
            rows = pl.ds(i * copy_rows, copy_rows)
            plgpu.copy_gmem_to_smem(source, ref.at[slot, rows], full.at[slot])

    def fill_both(tile, k_sources, v_sources):
        fill((smem.k, smem.k_full, smem.k_free), tiles.k_stages, tile, k_sources)
        fill((smem.v, smem.v_full, smem.v_free), tiles.v_stages, tile, v_sources)

    def visit(segment, carry):
        tiles_before, items_before = carry
        pl.when(items_before > 0)(lambda: plgpu.barrier_wait(smem.q_free.at[smem.pair]))
        query = (segment.row * s.kv_heads + segment.head) * s.group
        rows = pl.ds(0, s.part_rows)
        plgpu.copy_gmem_to_smem(
            refs.q.at[pl.ds(query, s.part_rows)],
            smem.q.at[smem.pair, rows],
            smem.q_full.at[smem.pair],
        )
        low = parts.first_visible(segment.kv_len, s.spec)
        pages = (
            lax.div(low, jnp.int32(s.page_size)),
            lax.div(segment.kv_len - 1, jnp.int32(s.page_size)),
        )

        def load_tile(i, _):
            places = parts.page_places(
                refs.table.at[segment.row],
                segment.first_tile + i,
                pages,
                block_kv=tiles.block_kv,
                page_size=s.page_size,
            )
            pools = [
                [pool.at[page, segment.head, pl.ds(offset, copy_rows)] for page, offset in places]
                for pool in (refs.k_pages, refs.v_pages)
            ]
            fill_both(tiles_before + i - segment.begin, *pools)

        lax.fori_loop(segment.begin, segment.end, load_tile, None)
        tiles_after = tiles_before + segment.end - segment.begin
        merge_tiles = _merge_tiles(s, segment)

        def load_parts(i, _):
            first = i * tile_parts

            def wait_for_part(j, _):
                plgpu.semaphore_wait(refs.part_ready.at[worker + 1 + j], memory_scope="gpu")

            lax.fori_loop(
                first, jnp.minimum(first + tile_parts, segment.parts), wait_for_part, None
            )
            place = (worker + 1 + first) * s.part_rows
            halves = [
                [half.at[pl.ds(place + j * copy_rows, copy_rows)] for j in range(copies)]
                for half in (refs.part_high, refs.part_low)
            ]
            fill_both(tiles_after + i, *halves)

        lax.fori_loop(0, merge_tiles, load_parts, None)
        return tiles_after + merge_tiles, items_before + 1

    _for_each_segment(s, refs.plan, refs.lens, worker, visit, (jnp.int32(0), jnp.int32(0)))


def _attend_tile(
    static: _Static,
    smem: Any,
    query: Any,
    segment: _Segment,
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
    logits = jnp.where(visible, parts.log2_weights(logits, s.spec), parts.MASKED)
    (acc, peak, mass), weights = parts.shrink_softmax(softmax, logits)
    weights = weights.astype(s.dtype)

    plgpu.barrier_wait(smem.v_full.at[v_slot])
    values = smem.v.at[v_slot]
    pl.when((high < block) | (low > 0))(lambda: parts.zero_rows_outside(values, low, high))
    acc = parts.add_products(acc, (weights, values))
    plgpu.barrier_arrive(smem.v_free.at[v_slot])
    return acc, peak, mass


def _merge_tile(
    static: _Static,
    refs: Any,
    smem: Any,
    worker: jax.Array,
    segment: _Segment,
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

    first = (worker + 1) * s.part_rows + i * block
    part_logits = plgpu.load(
        refs.part_logits.at[pl.ds(first, block)], layout=parts.COLUMNS, optimized=False
    )
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
    static: _Static, refs: Any, smem: Any, worker: jax.Array, softmax: parts.Softmax
) -> None:
    acc, peak, mass = softmax
    values = acc / parts.across_columns(mass, static.head_dim)
    high = values.astype(static.dtype)
    low = (values - high.astype(jnp.float32)).astype(static.dtype)
    rows = pl.ds(0, static.part_rows)
    place = pl.ds(worker * static.part_rows, static.part_rows)
    for half, ref in ((high, refs.part_high), (low, refs.part_low)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[smem.pair][...] = half
        if ref is refs.part_high:
            smem.part_logits.at[smem.pair][...] = peak + jnp.log2(mass)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[smem.pair, rows], ref.at[place])
    plgpu.copy_smem_to_gmem(smem.part_logits.at[smem.pair, rows], refs.part_logits.at[place])
    plgpu.wait_smem_to_gmem(0)
    plgpu.semaphore_signal(refs.part_ready.at[worker], memory_scope="gpu")


def _compute(static: _Static, refs: Any, smem: Any, worker: jax.Array) -> None:
    s = static
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
        merge_tiles = _merge_tiles(s, segment)

        def merge(i, softmax):
            return _merge_tile(s, refs, smem, worker, segment, i, tiles_after + i, softmax)

        softmax = lax.fori_loop(0, merge_tiles, merge, softmax)

        @pl.when(segment.begin == 0)
        def _():
            acc, _, mass = softmax
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem.out.at[smem.pair][...] = (acc / parts.across_columns(mass, s.head_dim)).astype(
                s.dtype
            )
            plgpu.commit_smem()
            target = refs.out.at[segment.row, segment.head]
            plgpu.copy_smem_to_gmem(smem.out.at[smem.pair, pl.ds(0, s.group)], target)

        pl.when(segment.begin > 0)(lambda: _store_part(s, refs, smem, worker, softmax))
        return tiles_after + merge_tiles

    _for_each_segment(s, refs.plan, refs.lens, worker, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _zero_padding_rows(static: _Static, refs: Any, smem: Any, worker: jax.Array) -> None:
    smem.out.at[smem.pair][...] = jnp.zeros(smem.out.shape[1:], static.dtype)
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


def _scratch_types(static: _Static) -> list[Any]:
    s, t = static, static.tiles
    width = tuning.swizzle_bytes(s.head_dim)
    tiled = (plgpu.TilingTransform((8, width // 2)), plgpu.SwizzleTransform(width))
    copies, _ = parts.copies_of_tile(t.block_kv, s.page_size)
    rows = parts.WARPGROUP_ROWS
    tiled_rows = (1, 8) if t.q_in_registers else (t.pairs, rows)
    return [
        plgpu.SMEM((t.pairs, rows, s.head_dim), s.dtype),
        plgpu.SMEM((*tiled_rows, s.head_dim), s.dtype, transforms=tiled),
        plgpu.SMEM((t.pairs * t.k_stages, t.block_kv, s.head_dim), s.dtype, transforms=tiled),
        plgpu.SMEM((t.pairs * t.v_stages, t.block_kv, s.head_dim), s.dtype, transforms=tiled),
        plgpu.SMEM((t.pairs, rows, s.head_dim), s.dtype),
        plgpu.SMEM((t.pairs, rows), jnp.float32),
        plgpu.Barrier(num_barriers=t.pairs),
        plgpu.Barrier(num_barriers=t.pairs),
        plgpu.Barrier(num_arrivals=copies, num_barriers=t.pairs * t.k_stages),
        plgpu.Barrier(num_barriers=t.pairs * t.k_stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=t.pairs * t.v_stages),
        plgpu.Barrier(num_barriers=t.pairs * t.v_stages),
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
    static = _Static(
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

    def kernel(*refs):
        pl.run_scoped(
            lambda *scratch: _run_warpgroup(static, refs, scratch),
            *_scratch_types(static),
            collective_axes="warpgroup",
        )

    places = static.part_places
    out, *_ = plgpu.kernel(
        kernel,
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
        compiler_params=parts.COMPILER_PARAMS,
    )(
        q.reshape(seqs * heads, head_dim),
        k_pages,
        v_pages,
        page_table,
        kv_lens,
        plan,
        parts.sink_rows(sinks, kv_heads, static.group),
    )
    return out.reshape(seqs, heads, head_dim)


def _run_warpgroup(static: _Static, refs: tuple[Any, ...], scratch: tuple[Any, ...]) -> None:
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.div(warpgroup, jnp.int32(2))
    worker = lax.axis_index("program") * static.tiles.pairs + pair
    ready = pl.get_global(plgpu.SemaphoreType.REGULAR((static.workers,)))
    arrays, smem = _GlobalRefs(*refs, ready), _Scratch(pair, *scratch)

    @pl.when(lax.rem(warpgroup, jnp.int32(2)) == 0)
    def _():
        plgpu.set_max_registers(200 if static.tiles.pairs == 2 else 232, action="increase")
        _compute(static, arrays, smem, worker)

    @pl.when(lax.rem(warpgroup, jnp.int32(2)) == 1)
    def _():
        plgpu.set_max_registers(56, action="decrease")
        _load(static, arrays, smem, worker)
