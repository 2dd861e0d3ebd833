"""The loading half of the mixed kernel, and the memory that both halves see."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.ragged_attention.mixed_plan import (
    Item,
    MixedStatic,
    for_each_item,
)


@dataclass(frozen=True)
class MixedRefs:
    """Arrays in global memory."""

    q: Any  # [tokens, kv_heads, group, head_dim]
    k_pages: Any
    v_pages: Any
    table: Any
    lens: Any
    cu_q_lens: Any
    plan: Any
    sinks: Any  # [kv_heads, WARPGROUP_ROWS], log2; None without sinks
    out: Any  # as q


@dataclass(frozen=True)
class MixedScratch:
    """Shared memory and barriers; the first dimension of q and out counts computing warpgroups."""

    q: Any
    q_tiled: Any
    k: Any
    v: Any
    out: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


def load_mixed(static: MixedStatic, refs: MixedRefs, smem: MixedScratch) -> None:
    """The loading warpgroup: runs ahead of the computing ones, into the next items too.

    Its warps work by themselves, each on half of every tile: two load keys, the other two load
    queries and values. A stream so waits for nothing but its own slots, and a copy costs the
    instructions of one warp.
    """
    keys = refs.k_pages, smem.k, smem.k_full, smem.k_free
    values = refs.v_pages, smem.v, smem.v_full, smem.v_free

    @plgpu.warp_map
    def _(warp):
        half = lax.rem(warp, jnp.int32(2))

        @pl.when(warp < 2)
        def _():
            _load_stream(static, refs, half, keys)

        @pl.when(warp >= 2)
        def _():
            _load_stream(static, refs, half, values, smem)


def _load_stream(
    static: MixedStatic, refs: MixedRefs, half: jax.Array, stream: Any, queries: Any = None
) -> None:
    """Load one half of all tiles of K or of V; before an item's, its queries, if given a place."""

    def visit(item, carry):
        tiles_before, uses = carry
        if queries is not None:
            uses = _load_query(static, refs, queries, item, half, uses)
        _load_tiles(static, refs, item, half, stream, tiles_before)
        return tiles_before + item.tiles, uses

    for_each_item(static, refs, visit, (jnp.int32(0), jnp.int32(0)))


def _load_query(
    static: MixedStatic,
    refs: MixedRefs,
    smem: MixedScratch,
    item: Item,
    warpgroup: jax.Array,
    uses: jax.Array,
) -> jax.Array:
    """Load a warpgroup's rows of q, if the item has any; its uses of the buffer afterwards."""
    s, full = static, smem.q_full.at[warpgroup]
    has_rows = item.tokens > warpgroup * s.warpgroup_tokens
    has_rows &= warpgroup < s.tiles.warpgroups

    @pl.when(has_rows)
    def _():
        pl.when(uses > 0)(lambda: plgpu.barrier_wait(smem.q_free.at[warpgroup]))
        token = item.token + warpgroup * s.warpgroup_tokens
        if s.group == 1:
            source = refs.q.at[pl.ds(token, s.warpgroup_tokens), item.head, 0]
            plgpu.copy_gmem_to_smem(source, smem.q.at[warpgroup], full)
            return
        for i in range(s.warpgroup_tokens):  # past the row's end come others', or zeros
            target = smem.q.at[warpgroup, pl.ds(i * s.group, s.group)]
            plgpu.copy_gmem_to_smem(refs.q.at[token + i, item.head], target, full)

    return uses + jnp.where(has_rows, 1, 0)


def _load_tiles(
    static: MixedStatic,
    refs: MixedRefs,
    item: Item,
    half: jax.Array,
    stream: Any,
    tiles_before: jax.Array,
) -> None:
    s, (pool, ring, full, free) = static, stream
    rows = s.tiles.block_kv // 2
    sizes = {"block_kv": rows, "page_size": s.page_size}
    _, copy_rows = parts.copies_of_tile(**sizes)
    low, page_size = jnp.int32(0), jnp.int32(s.page_size)
    if s.spec.window is not None:
        low = jnp.maximum(item.position + 1 - s.spec.window, 0)
    page_range = lax.div(low, page_size), lax.div(item.kv_len - 1, page_size)

    def half_tile(i):
        return 2 * (item.first_tile + item.tiles - 1 - i) + half

    def pages_of(i):
        return parts.pages_of_tile(refs.table.at[item.row], half_tile(i), page_range, **sizes)

    def load(i, page_ids):
        next_page_ids = pages_of(i + 1)  # asked for early: the copies do not wait for them
        offset = parts.offset_in_page(half_tile(i), **sizes)
        done = tiles_before + i
        slot = lax.rem(done, jnp.int32(s.tiles.stages))
        pl.when(done >= s.tiles.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        for j, page in enumerate(page_ids):
            source = pool.at[page, item.head, pl.ds(offset, copy_rows)]
            place = half * rows + j * copy_rows
            plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(place, copy_rows)], full.at[slot])
        return next_page_ids

    lax.fori_loop(0, item.tiles, load, pages_of(0))
