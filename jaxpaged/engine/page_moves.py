"""Pages that change place before a step: within the pool, and to and from host memory."""

import itertools
import math
from collections.abc import Callable, Sequence
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

COPY_WIDTHS = (8, 64)  # pairs of pages that a program takes
HOST_MEMORY = "pinned_host"


class PageMover:
    """Starts the programs that move pages, and keeps those in host memory. Used by the runner.

    Nothing here waits: a transfer runs beside the steps that do not need it.

    Args:
        program: the finished program of a kind (copy, fetch, store) and a width in pages.
    """

    def __init__(self, program: Callable[[str, int], Any]):
        self._program = program
        self._kept: dict[int, list[jax.Array]] = {}  # by sequence, each of a width of MOVE_WIDTHS

    def copy(self, kv_pages: Pool, copies: Sequence[tuple[int, int]]) -> Pool:
        """Each second page becomes a copy of the first; no page is in both places."""
        for batch in batches(copies, COPY_WIDTHS):
            kv_pages = self._program("copy", batch.shape[1])(kv_pages, batch)
        return kv_pages

    def move(self, kv_pages: Pool, moves: Sequence[PageMove]) -> Pool:
        """Swap pages out and in, in the order of `moves`."""
        for move in moves:
            if move.kind == "out":
                self._kept[move.seq_id] = self._swap_out(kv_pages, move.page_ids)
                continue
            chunks = self._kept.pop(move.seq_id)
            if move.kind == "in":
                kv_pages = self._swap_in(kv_pages, chunks, move)
        return kv_pages

    def _swap_out(self, kv_pages: Pool, page_ids: Sequence[int]) -> list[jax.Array]:
        chunks: list[jax.Array] = []
        for first in range(0, len(page_ids), MOVE_WIDTHS[-1]):
            chunk = page_ids[first : first + MOVE_WIDTHS[-1]]
            width = next(width for width in MOVE_WIDTHS if width >= len(chunk))
            padded = np.zeros(width, np.int32)
            padded[: len(chunk)] = chunk
            rows = self._program("fetch", width)(kv_pages, padded)
            chunks.append(jax.device_put(rows, rows.sharding.with_memory_kind(HOST_MEMORY)))
        return chunks

    def _swap_in(self, kv_pages: Pool, chunks: Sequence[jax.Array], move: PageMove) -> Pool:
        wanted = dict(enumerate(move.page_ids, move.first))
        device = jax.tree.leaves(kv_pages)[0].sharding
        first = 0
        for chunk in chunks:
            width = chunk.shape[0]
            # what is not wanted goes to the null page
            targets = np.array([wanted.get(first + i, 0) for i in range(width)], np.int32)
            if targets.any():
                rows = jax.device_put(chunk, device)
                kv_pages = self._program("store", width)(kv_pages, rows, targets)
            first += width
        return kv_pages


def copy_pages(kv_pages: Pool, pairs: Int32[Array, "2 pages"]) -> Pool:
    """Make pages `pairs[1]` copies of pages `pairs[0]` in every layer."""
    sources, targets = pairs
    return jax.tree.map(lambda pool: pool.at[targets].set(pool[sources]), kv_pages)


def fetch_pages(
    kv_pages: Pool, page_ids: Int32[Array, " pages"]
) -> Float[Array, "pages page_elements"]:
    """Each page of all layers as one row, keys and values."""
    leaves = jax.tree.leaves(kv_pages)
    rows = [pool[page_ids].reshape(page_ids.shape[0], -1) for pool in leaves]
    return jnp.concatenate(rows, axis=1)


def store_pages(
    kv_pages: Pool, rows: Float[Array, "pages page_elements"], page_ids: Int32[Array, " pages"]
) -> Pool:
    """Put rows of `fetch_pages` into pages of the pool."""
    leaves, tree = jax.tree.flatten(kv_pages)
    sizes = [math.prod(pool.shape[1:]) for pool in leaves]
    columns = jnp.split(rows, list(itertools.accumulate(sizes))[:-1], axis=1)
    filled = [
        pool.at[page_ids].set(column.reshape(-1, *pool.shape[1:]))
        for pool, column in zip(leaves, columns, strict=True)
    ]
    return jax.tree.unflatten(tree, filled)


def batches(pairs: Sequence[tuple[int, int]], widths: Sequence[int]) -> list[np.ndarray]:
    """The pairs as columns of arrays, each of the least width that takes it.

    Padding names the null page twice.
    """
    arrays: list[np.ndarray] = []
    for first in range(0, len(pairs), widths[-1]):
        batch = pairs[first : first + widths[-1]]
        width = next(width for width in widths if width >= len(batch))
        array = np.zeros((2, width), np.int32)
        array[:, : len(batch)] = np.array(batch, np.int32).T
        arrays.append(array)
    return arrays


def page_rows(kv_pages: Any, width: int) -> ShapeDtypeStruct:
    """What `fetch_pages` gives for `width` pages."""
    leaves = jax.tree.leaves(kv_pages)
    size = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return ShapeDtypeStruct((width, size), leaves[0].dtype, sharding=leaves[0].sharding)
