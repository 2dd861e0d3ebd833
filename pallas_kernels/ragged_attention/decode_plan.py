"""Who does what in a decode launch: the plan, made once a step, and a worker's walk along it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import tuning
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.spec import AttentionSpec

MERGE_COST_TILES = 4  # a merge at the end takes as long as so many tiles


@dataclass(frozen=True)
class DecodeStatic:
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
        """Columns of the products, so rows of q loaded and of a part stored: the group, padded."""
        return 8 if self.group <= 8 else 16

    @property
    def piece(self) -> int:
        """Places of a head in one product's result: a multiple of its 64 rows."""
        rows = parts.WARPGROUP_ROWS
        return rows if self.head_dim % rows else self.head_dim

    @property
    def pieces(self) -> list[Any]:
        """Slices of a head, which make it whole. Two of 96 overlap, and agree where they do."""
        return [pl.ds(start, self.piece) for start in sorted({0, self.head_dim - self.piece})]

    @property
    def part_places(self) -> int:
        """Rows of the array of parts; a tile read at its end must stay inside."""
        return self.workers * self.part_rows + self.tiles.block_kv


@dataclass(frozen=True)
class Segment:
    """A worker's stretch of the tiles of one row and KV head, counted from the first visible."""

    row: jax.Array
    head: jax.Array
    kv_len: jax.Array
    first_tile: jax.Array
    begin: jax.Array
    end: jax.Array
    tiles: jax.Array  # of the whole head
    parts: jax.Array  # workers after this one that have a part of this head, if it is shared
    owner: jax.Array  # the worker that has its beginning


def plan_decode(
    kv_lens: Int32[Array, " seqs"],
    *,
    kv_heads: int,
    workers: int,
    spec: AttentionSpec,
    tiles: tuning.DecodeTiles,
) -> Int32[Array, " words"]:
    """Share the line of tiles out among the workers.

    Borders move to the nearest beginning of a head where that costs less than merging parts would.

    Words: tiles a worker, border before each worker's stretch and after the last one's, first row
    of each worker, last row of each worker (less than the first if it has no work), place of each
    row in the line.
    """
    block = jnp.int32(tiles.block_kv)
    first = lax.div(parts.first_visible(kv_lens, spec), block)
    head_tiles = jnp.where(kv_lens > 0, lax.div(kv_lens + (block - 1), block) - first, 0)
    row_tiles = head_tiles * kv_heads
    row = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    before = row[None, :] < row[:, None]
    starts = jnp.sum(jnp.where(before, row_tiles[None, :], 0), axis=1, dtype=jnp.int32)
    total = jnp.sum(row_tiles, dtype=jnp.int32)
    share = jnp.maximum(lax.div(total + (workers - 1), jnp.int32(workers)), tiles.min_tiles)
    even = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32) * share, total)
    whole = _nearest_head(even, starts, row_tiles, jnp.maximum(head_tiles, 1))
    whole = jnp.where(even == total, total, whole)
    is_balanced = jnp.max(whole[1:] - whole[:-1]) <= share + MERGE_COST_TILES
    borders = jnp.where(is_balanced, whole, even)
    begins, ends = borders[:-1, None], borders[1:, None]
    row_starts, row_ends = starts[None, :], (starts + row_tiles)[None, :]
    first_row = jnp.sum(row_ends <= begins, axis=1, dtype=jnp.int32)
    has_work = (row_starts < ends) & (row_ends > begins) & (row_tiles > 0)[None, :]
    last_row = jnp.max(jnp.where(has_work, row[None, :], -1), axis=1)
    return jnp.concatenate([share[None], borders, first_row, last_row, starts])


def _nearest_head(
    places: Int32[Array, " places"],
    starts: Int32[Array, " seqs"],
    row_tiles: Int32[Array, " seqs"],
    head_tiles: Int32[Array, " seqs"],
) -> Int32[Array, " places"]:
    """Move places in the line to the nearest beginning of a head."""
    inside = (starts[None, :] <= places[:, None]) & (
        places[:, None] < (starts + row_tiles)[None, :]
    )

    def of_row(values):
        return jnp.sum(jnp.where(inside, values[None, :], 0), axis=1, dtype=jnp.int32)

    tiles = jnp.maximum(of_row(head_tiles), 1)
    start = of_row(starts)
    return start + lax.div(places - start + lax.div(tiles, jnp.int32(2)), tiles) * tiles


def for_each_segment(
    static: DecodeStatic,
    plan_ref: Any,
    lens_ref: Any,
    worker: jax.Array,
    visit: Callable,
    carry: Any,
) -> Any:
    """`carry = visit(segment, carry)` for each segment of the worker, along the line; the last."""
    workers, block = static.workers, jnp.int32(static.tiles.block_kv)
    share, begin, end = plan_ref[0], plan_ref[1 + worker], plan_ref[2 + worker]
    first_row, last_row = plan_ref[2 + workers + worker], plan_ref[2 + 2 * workers + worker]

    def visit_row(row, carry):
        start, kv_len = plan_ref[2 + 3 * workers + row], lens_ref[row]
        first_tile = lax.div(parts.first_visible(kv_len, static.spec), block)
        tiles = lax.div(kv_len + (block - 1), block) - first_tile
        low = jnp.maximum(begin - start, 0)
        high = jnp.minimum(end - start, tiles * static.kv_heads)
        tiles = jnp.maximum(tiles, 1)  # a row without KV has no heads to visit

        def visit_head(head, carry):
            here = head * tiles
            last_part = lax.div(start + here + tiles - 1, share)
            segment = Segment(
                row=row,
                head=head,
                kv_len=kv_len,
                first_tile=first_tile,
                begin=jnp.maximum(low - here, 0),
                end=jnp.minimum(high - here, tiles),
                tiles=tiles,
                parts=last_part - worker,
                owner=lax.div(start + here, share),
            )
            return visit(segment, carry)

        first_head = lax.div(low, tiles)
        last_head = jnp.where(high > low, lax.div(high - 1, tiles), -1)
        return lax.fori_loop(first_head, last_head + 1, visit_head, carry)

    return lax.fori_loop(first_row, last_row + 1, visit_row, carry)


def count_merge_tiles(static: DecodeStatic, segment: Segment) -> jax.Array:
    """Tiles of parts that the owner of this segment must take in."""
    rows = segment.parts * static.part_rows
    block = jnp.int32(static.tiles.block_kv)
    owns = (segment.begin == 0) & (segment.end < segment.tiles)
    return jnp.where(owns, lax.div(rows + (block - 1), block), 0)
