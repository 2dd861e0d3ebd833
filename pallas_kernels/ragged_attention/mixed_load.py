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
    turn: Any  # whose turn on the tensor cores it is


def load_mixed(static: MixedStatic, refs: MixedRefs, smem: MixedScratch) -> None:
    """The loading warpgroup: runs ahead of the computing ones, into the next items too."""

    def visit(item, carry):
        tiles_before, uses = carry
        uses = tuple(
            _load_query(static, refs, smem, item, warpgroup, uses[warpgroup])
            for warpgroup in range(static.tiles.warpgroups)
        )
        _load_tiles(static, refs, smem, item, tiles_before)
        return tiles_before + item.tiles, uses

    unused = (jnp.int32(0),) * static.tiles.warpgroups
    for_each_item(static, refs, visit, (jnp.int32(0), unused))


def _load_query(
    static: MixedStatic,
    refs: MixedRefs,
    smem: MixedScratch,
    item: Item,
    warpgroup: int,
    uses: jax.Array,
) -> jax.Array:
    """Load a warpgroup's rows of q, if the item has any; its uses of the buffer afterwards."""
    s, full = static, smem.q_full.at[warpgroup]
    has_rows = item.tokens > warpgroup * s.warpgroup_tokens

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
    static: MixedStatic, refs: MixedRefs, smem: MixedScratch, item: Item, tiles_before: jax.Array
) -> None:
    s, sizes = static, {"block_kv": static.tiles.block_kv, "page_size": static.page_size}
    _, copy_rows = parts.copies_of_tile(**sizes)
    low, page_size = jnp.int32(0), jnp.int32(s.page_size)
    if s.spec.window is not None:
        low = jnp.maximum(item.position + 1 - s.spec.window, 0)
    page_range = lax.div(low, page_size), lax.div(item.kv_len - 1, page_size)

    def tile_number(i):
        return item.first_tile + item.tiles - 1 - i

    def pages_of(i):
        return parts.pages_of_tile(refs.table.at[item.row], tile_number(i), page_range, **sizes)

    def load(i, page_ids, pool, ring, full, free):
        offset = parts.offset_in_page(tile_number(i), **sizes)
        done = tiles_before + i
        slot = lax.rem(done, jnp.int32(s.tiles.stages))
        pl.when(done >= s.tiles.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        for j, page in enumerate(page_ids):
            source = pool.at[page, item.head, pl.ds(offset, copy_rows)]
            target = ring.at[slot, pl.ds(j * copy_rows, copy_rows)]
            plgpu.copy_gmem_to_smem(source, target, full.at[slot])

    def load_keys(i, page_ids):
        load(i, page_ids, refs.k_pages, smem.k, smem.k_full, smem.k_free)

    def load_values_and_next_keys(i, carry):
        page_ids, next_page_ids = carry
        ids_after = pages_of(i + 2)  # asked for early: the copies do not wait for them
        # in the order of need, which is also that in which the slots come free
        pl.when(i + 1 < item.tiles)(lambda: load_keys(i + 1, next_page_ids))
        load(i, page_ids, refs.v_pages, smem.v, smem.v_full, smem.v_free)
        return next_page_ids, ids_after

    page_ids = pages_of(0)
    load_keys(0, page_ids)
    lax.fori_loop(0, item.tiles, load_values_and_next_keys, (page_ids, pages_of(1)))
