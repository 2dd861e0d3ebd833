"""Weights onto their devices: each shard is filled on the host and sent to those that hold it."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from jaxpaged.arrays import Params
from jaxpaged.weights.file_bytes import aligned

MAX_THREADS = 8
MAX_HOST_BYTES = 2**27  # of shards on their way; a larger one goes alone

type Destination = jax.sharding.Sharding | Any
"""A device, a sharding, or None for the default device."""


@dataclass(frozen=True)
class Shard:
    """A part of a weight whose shape is `of`: from where to where on each axis, and its values."""

    of: tuple[int, ...]
    index: tuple[slice, ...]  # every slice has a start and a stop
    values: NDArray[Any]


class Reader(Protocol):
    """Where values come from. `fill` is called from several threads."""

    def fill(self, path: str, shards: Sequence[Shard]) -> None:
        """Write the values of shards of the weight at `path` that differ in their last axis only.

        They come together because a file has their rows together.
        """
        ...


@dataclass(frozen=True)
class PaddedVocab:
    """Fills the embeddings of a layout with more rows than the model has; the others are zeros."""

    reader: Reader
    vocab: int

    def fill(self, path: str, shards: Sequence[Shard]) -> None:
        if path.endswith(".table"):
            shards = [self._known(shard) for shard in shards]
        if all(shard.values.size for shard in shards):
            self.reader.fill(path, shards)

    def _known(self, shard: Shard) -> Shard:
        rows, *rest = shard.index
        stop = max(rows.start, min(rows.stop, self.vocab))
        num_known = stop - rows.start
        shard.values[num_known:] = 0
        index = (slice(rows.start, stop), *rest)
        return Shard((self.vocab, *shard.of[1:]), index, shard.values[:num_known])


@dataclass(frozen=True)
class _Job:
    """Shards that are filled together, and the devices that get each of them."""

    number: int  # of the weight
    path: str
    leaf: jax.ShapeDtypeStruct
    holders: dict[tuple[tuple[int, int], ...], list[Any]]

    @property
    def num_bytes(self) -> int:
        item = np.dtype(self.leaf.dtype).itemsize
        return item * sum(int(np.prod([b - a for a, b in key])) for key in self.holders)


def place_params(abstract: Params, reader: Reader, device: Destination) -> Params:
    """Fill the weights that `abstract` describes, each on its own sharding, or else on `device`.

    The host holds `MAX_HOST_BYTES` of shards at a time, or one job where that has more.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    jobs = [
        job
        for n, (path, leaf) in enumerate(leaves)
        for job in _jobs(n, path_of(path), leaf, device)
    ]
    budget = _Budget(MAX_HOST_BYTES)

    def place(job: _Job) -> tuple[int, list[jax.Array]]:
        with budget.take(job.num_bytes):
            dtype = np.dtype(job.leaf.dtype)
            shards = [
                Shard(job.leaf.shape, tuple(slice(a, b) for a, b in key), _empty(key, dtype))
                for key in job.holders
            ]
            reader.fill(job.path, shards)
            pairs = zip(shards, job.holders.values(), strict=True)
            arrays = [jax.device_put(shard.values, d) for shard, found in pairs for d in found]
            return job.number, jax.block_until_ready(arrays)

    placed: dict[int, list[jax.Array]] = defaultdict(list)
    with ThreadPoolExecutor(min(MAX_THREADS, 2 * (os.cpu_count() or 1))) as threads:
        for number, arrays in threads.map(place, jobs):
            placed[number].extend(arrays)
    return tree.unflatten(
        _joined(leaf, placed[n], _destination(leaf, device)) for n, (_, leaf) in enumerate(leaves)
    )


def path_of(keys: Sequence[Any]) -> str:
    """The path of a weight with dots, as the families' tables write it."""
    return ".".join(str(entry.key) for entry in keys)


def _destination(leaf: jax.ShapeDtypeStruct, device: Destination) -> Destination:
    """The sharding that a weight names, or else `device`."""
    return device if leaf.sharding is None else leaf.sharding


def _jobs(
    number: int, path: str, leaf: jax.ShapeDtypeStruct, device: Destination
) -> Iterator[_Job]:
    target = _destination(leaf, device)
    if not isinstance(target, jax.sharding.Sharding):
        yield _Job(number, path, leaf, {tuple((0, size) for size in leaf.shape): [target]})
        return
    bands: dict[tuple[tuple[int, int], ...], dict[tuple[tuple[int, int], ...], list[Any]]] = {}
    for held_by, index in target.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        sides = zip(index, leaf.shape, strict=True)
        key = tuple(
            (part.start or 0, size if part.stop is None else part.stop) for part, size in sides
        )
        bands.setdefault(key[:-1], {}).setdefault(key, []).append(held_by)
    for holders in bands.values():
        yield _Job(number, path, leaf, holders)


def _empty(key: tuple[tuple[int, int], ...], dtype: np.dtype) -> NDArray[Any]:
    shape = [stop - start for start, stop in key]
    return aligned(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)


def _joined(leaf: jax.ShapeDtypeStruct, arrays: list[jax.Array], target: Destination) -> jax.Array:
    if not isinstance(target, jax.sharding.Sharding):
        return arrays[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, target, arrays)


class _Budget:
    """Bytes that threads may hold together."""

    def __init__(self, limit: int):
        self._limit, self._held, self._changed = limit, 0, threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._limit)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
