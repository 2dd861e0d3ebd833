"""The loading half of the decode kernel, and the memory that both halves see."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.decode_plan import (
    DecodeStatic,
    Segment,
    count_merge_tiles,
    for_each_segment,
)


@dataclass(frozen=True)
class DecodeRefs:
    """Arrays in global memory. A part is one worker's share of a head that another one owns."""

    q: Any  # [seqs * heads, head_dim]
    k_pages: Any
    v_pages: Any
    table: Any
    lens: Any
    plan: Any
    sinks: Any  # [kv_heads, WARPGROUP_ROWS], log2; None without sinks
    out: Any  # [seqs, kv_heads, group, head_dim]
    part_high: Any  # [part_places, head_dim]: rounded values of the parts,
    part_low: Any  # and what the rounding left
    part_logits: Any  # [part_places]: log2 of the sum of each row's weights
    parts_ready: Any  # a semaphore a worker: parts of its head that are there


@dataclass(frozen=True)
class DecodeScratch:
    """One pair's view of shared memory and barriers; every first dimension counts pairs."""

    pair: jax.Array
    q: Any  # [pairs, pieces, part_rows, piece]: Mosaic lays out no slices of rows of 96 untiled
    q_tiled: Any  # [pairs, part_rows, head_dim], as the tensor cores read it
    k: Any  # first dimension pairs * k_stages, as in k_full and k_free
    v: Any
    weights: Any  # [2 * pairs, part_rows, block_kv]: of a tile's values, and what rounding left
    scratch: Any  # in which warps reduce
    out: Any  # [pairs, pieces, part_rows, piece]
    logits: Any  # each pair's own part's, on their way out; then each pair's, of parts coming in
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    merge_full: Any
    merge_free: Any

    def slot(self, tile: jax.Array, stages: int) -> jax.Array:
        return self.pair * stages + lax.rem(tile, jnp.int32(stages))


def load_decode(
    static: DecodeStatic, refs: DecodeRefs, smem: DecodeScratch, worker: jax.Array
) -> None:
    """The loading warpgroup: runs ahead of the computing one, into the next segments too."""
    s = static

    def visit(segment, tiles_before):
        plgpu.barrier_wait(smem.q_free.at[smem.pair])
        query = (segment.row * s.kv_heads + segment.head) * s.group
        full = smem.q_full.at[smem.pair]
        for i, piece in enumerate(s.pieces):
            source = refs.q.at[pl.ds(query, s.part_rows), piece]
            plgpu.copy_gmem_to_smem(source, smem.q.at[smem.pair, i], full)
        _load_tiles(s, refs, smem, segment, tiles_before)
        tiles_after = tiles_before + segment.end - segment.begin
        merge_tiles = count_merge_tiles(s, segment)

        @pl.when(merge_tiles > 0)
        def _():
            ready = refs.parts_ready.at[worker]
            plgpu.semaphore_wait(ready, segment.parts, memory_scope="gpu")
            parts.fence_copy_engine()

        def load_parts(i, _):
            _load_parts(s, refs, smem, worker, i, tiles_after + i)

        lax.fori_loop(0, merge_tiles, load_parts, None)
        return tiles_after + merge_tiles

    for_each_segment(s, refs.plan, refs.lens, worker, visit, jnp.int32(0))


def _fill(
    static: DecodeStatic,
    smem: DecodeScratch,
    tile: jax.Array,
    k_sources: list[Any],
    v_sources: list[Any],
) -> None:
    """Copy the worker's `tile`-th tile of K and of V into their rings, as soon as there is room."""
    s = static.tiles
    _, copy_rows = parts.copies_of_tile(s.block_kv, static.page_size)
    for sources, ring, full, free, stages in (
        (k_sources, smem.k, smem.k_full, smem.k_free, s.k_stages),
        (v_sources, smem.v, smem.v_full, smem.v_free, s.v_stages),
    ):
        slot = smem.slot(tile, stages)
        pl.when(tile >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
        for i, source in enumerate(sources):
            rows = pl.ds(i * copy_rows, copy_rows)
            plgpu.copy_gmem_to_smem(source, ring.at[slot, rows], full.at[slot])


def _load_tiles(
    static: DecodeStatic,
    refs: DecodeRefs,
    smem: DecodeScratch,
    segment: Segment,
    tiles_before: jax.Array,
) -> None:
    s, sizes = static, {"block_kv": static.tiles.block_kv, "page_size": static.page_size}
    _, copy_rows = parts.copies_of_tile(**sizes)
    low, page_size = parts.first_visible(segment.kv_len, s.spec), jnp.int32(s.page_size)
    page_range = lax.div(low, page_size), lax.div(segment.kv_len - 1, page_size)

    def pages_of(i):
        table_row = refs.table.at[segment.row]
        return parts.pages_of_tile(table_row, segment.first_tile + i, page_range, **sizes)

    def load_tile(i, page_ids):
        next_page_ids = pages_of(i + 1)  # asked for early: the copies do not wait for them
        rows = pl.ds(parts.offset_in_page(segment.first_tile + i, **sizes), copy_rows)
        k_sources, v_sources = (
            [pool.at[page, segment.head, rows] for page in page_ids]
            for pool in (refs.k_pages, refs.v_pages)
        )
        _fill(s, smem, tiles_before + i - segment.begin, k_sources, v_sources)
        return next_page_ids

    lax.fori_loop(segment.begin, segment.end, load_tile, pages_of(segment.begin))


def _load_parts(
    static: DecodeStatic,
    refs: DecodeRefs,
    smem: DecodeScratch,
    worker: jax.Array,
    i: jax.Array,
    tile: jax.Array,
) -> None:
    """Copy the `i`-th tile of the following workers' parts into the rings, as their `tile`-th."""
    s, block = static, static.tiles.block_kv
    copies, copy_rows = parts.copies_of_tile(block, s.page_size)
    place = (worker + 1) * s.part_rows + i * block
    high, low = (
        [half.at[pl.ds(place + j * copy_rows, copy_rows)] for j in range(copies)]
        for half in (refs.part_high, refs.part_low)
    )
    _fill(s, smem, tile, high, low)
    pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.merge_free.at[smem.pair]))
    logits, full = smem.logits.at[static.tiles.pairs + smem.pair], smem.merge_full.at[smem.pair]
    plgpu.copy_gmem_to_smem(refs.part_logits.at[pl.ds(place, block)], logits, full)
