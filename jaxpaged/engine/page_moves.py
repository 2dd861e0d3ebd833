"""Pages that change place before a step: within the pool, and to and from host memory."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Int32

from jaxpaged.arrays import KVPages
from jaxpaged.core.host_tier import MOVE_WIDTHS
from jaxpaged.core.plan import PageMove

type Pool = tuple[KVPages, ...]
type Pairs = Sequence[tuple[int, int]]

COPY_WIDTHS = (8, 64)  # pairs of pages that a program takes
HOST_MEMORY = "pinned_host"


@dataclass(frozen=True)
class PageKinds:
    """Which layers take local pages. Where some do and some do not, ids come in two rows."""

    is_local: tuple[bool, ...]  # by layer

    @property
    def has_both(self) -> bool:
        return len(set(self.is_local)) > 1

    def choose(self, pages: Sequence[Any], local_pages: Sequence[Any]) -> Sequence[Any]:
        """What the programs take of ids, or pairs of them, of both kinds."""
        if self.has_both:
            return list(zip(pages, local_pages, strict=True))
        return local_pages if self.is_local[0] else pages

    def by_leaf(self, ids: Array) -> list[Array]:
        """The ids that each array of the pool takes, keys and values."""
        if not self.has_both:
            return [ids] * (2 * len(self.is_local))
        return [ids[int(is_local)] for is_local in self.is_local for _ in "kv"]


class PageMover:
    """Starts the programs that move pages, and keeps those in host memory. Used by the runner.

    Nothing here waits: a transfer runs beside the steps that do not need it.

    Args:
        program: the finished program of a kind (copy, fetch, store) and a width in pages.
        kinds: which page ids the layers take.
    """

    def __init__(self, program: Callable[[str, int], Any], kinds: PageKinds):
        self._program, self._kinds = program, kinds
        # by sequence or part of the prefix cache, each of a width of MOVE_WIDTHS
        self._kept: dict[int, list[jax.Array]] = {}

    def copy(self, kv_pages: Pool, copies: Pairs, local_copies: Pairs = ()) -> Pool:
        """Each second page becomes a copy of the first; no page is in both places."""
        for batch in batches(self._kinds.choose(copies, local_copies), COPY_WIDTHS):
            kv_pages = self._program("copy", batch.shape[-1])(kv_pages, batch)
        return kv_pages

    def move(self, kv_pages: Pool, moves: Sequence[PageMove]) -> Pool:
        """Swap pages out and in, in the order of `moves`."""
        for move in moves:
            if move.kind == "out":
                self._kept[move.seq_id] = self._swap_out(kv_pages, move)
                continue
            chunks = self._kept[move.seq_id]
            if move.kind != "fill":
                del self._kept[move.seq_id]
            if move.kind != "drop":
                kv_pages = self._swap_in(kv_pages, chunks, move)
        return kv_pages

    def _swap_out(self, kv_pages: Pool, move: PageMove) -> list[jax.Array]:
        chunks: list[jax.Array] = []
        page_ids = np.array(self._kinds.choose(move.page_ids, move.local_ids), np.int32)
        for first in range(0, len(page_ids), MOVE_WIDTHS[-1]):
            chunk = page_ids[first : first + MOVE_WIDTHS[-1]]
            width = next(width for width in MOVE_WIDTHS if width >= len(chunk))
            padded = np.zeros((width, *chunk.shape[1:]), np.int32)
            padded[: len(chunk)] = chunk
            rows = self._program("fetch", width)(kv_pages, padded.T)
            chunks.append(jax.device_put(rows, rows.sharding.with_memory_kind(HOST_MEMORY)))
        return chunks

    def _swap_in(self, kv_pages: Pool, chunks: Sequence[jax.Array], move: PageMove) -> Pool:
        page_ids = np.array(self._kinds.choose(move.page_ids, move.local_ids), np.int32)
        device = jax.tree.leaves(kv_pages)[0].sharding
        first = 0
        for chunk in chunks:
            width = chunk.shape[0]
            # what is not wanted goes to the null page
            targets = np.zeros((width, *page_ids.shape[1:]), np.int32)
            begin, end = max(first, move.first), min(first + width, move.first + len(page_ids))
            if begin < end:
                wanted = page_ids[begin - move.first : end - move.first]
                targets[begin - first : end - first] = wanted
                rows = jax.device_put(chunk, device)
                kv_pages = self._program("store", width)(kv_pages, rows, targets.T)
            first += width
        return kv_pages


def copy_pages(kv_pages: Pool, pairs: Int32[Array, "... 2 pages"], *, kinds: PageKinds) -> Pool:
    """Make pages `pairs[1]` copies of pages `pairs[0]` in every layer."""
    ids = kinds.by_leaf(pairs)
    leaves, tree = jax.tree.flatten(kv_pages)
    done = [
        pool.at[targets].set(pool[sources])
        for pool, (sources, targets) in zip(leaves, ids, strict=True)
    ]
    return jax.tree.unflatten(tree, done)


def fetch_pages(
    kv_pages: Pool, page_ids: Int32[Array, "... pages"], *, kinds: PageKinds
) -> Float[Array, "pages page_elements"]:
    """Each page of all layers as one row, keys and values."""
    leaves, width = jax.tree.leaves(kv_pages), page_ids.shape[-1]
    rows = [
        pool[ids].reshape(width, -1)
        for pool, ids in zip(leaves, kinds.by_leaf(page_ids), strict=True)
    ]
    return jnp.concatenate(rows, axis=1)


def store_pages(
    kv_pages: Pool,
    rows: Float[Array, "pages page_elements"],
    page_ids: Int32[Array, "... pages"],
    *,
    kinds: PageKinds,
) -> Pool:
    """Put rows of `fetch_pages` into pages of the pool."""
    leaves, tree = jax.tree.flatten(kv_pages)
    sizes = [math.prod(pool.shape[1:]) for pool in leaves]
    columns = jnp.split(rows, list(itertools.accumulate(sizes))[:-1], axis=1)
    filled = [
        pool.at[ids].set(column.reshape(-1, *pool.shape[1:]))
        for pool, column, ids in zip(leaves, columns, kinds.by_leaf(page_ids), strict=True)
    ]
    return jax.tree.unflatten(tree, filled)


def batches(pairs: Sequence[Any], widths: Sequence[int]) -> list[np.ndarray]:
    """The pairs (or pairs of both kinds) as columns of arrays, each of the least width that fits.

    Padding names the null page twice.
    """
    arrays: list[np.ndarray] = []
    for first in range(0, len(pairs), widths[-1]):
        batch = np.moveaxis(np.array(pairs[first : first + widths[-1]], np.int32), 0, -1)
        width = next(width for width in widths if width >= batch.shape[-1])
        array = np.zeros((*batch.shape[:-1], width), np.int32)
        array[..., : batch.shape[-1]] = batch
        arrays.append(array)
    return arrays


def page_rows(kv_pages: Any, width: int) -> ShapeDtypeStruct:
    """What `fetch_pages` gives for `width` pages."""
    leaves = jax.tree.leaves(kv_pages)
    size = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return ShapeDtypeStruct((width, size), leaves[0].dtype, sharding=leaves[0].sharding)
