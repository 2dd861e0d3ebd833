"""Which rows of a checkpoint's tensors make up a shard of our weights."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpaged.models.family import Place
from jaxpaged.weights.placing import Shard
from jaxpaged.weights.source import TensorSource, cast_into

CHUNK_ELEMENTS = 2**21  # turned at a time, so that no tensor is whole in memory a second time


class CheckpointReader:
    """Fills shards from a checkpoint that has the names and shapes of its family."""

    def __init__(self, source: TensorSource, places: Mapping[str, Place], norm_plus_one: bool):
        self._source, self._norm_plus_one = source, norm_plus_one
        self._pieces: dict[str, list[tuple[str, Place]]] = defaultdict(list)
        for name, place in places.items():
            self._pieces[place.path].append((name, place))

    def fill(self, path: str, shards: Sequence[Shard]) -> None:
        added = 1.0 if self._norm_plus_one and path.endswith(".scale") else 0.0
        for name, place in self._pieces[path]:
            num_rows, *rest = self._source.tensors[name].shape
            # of a tensor with one axis, a bias, the last axis of ours is the rows
            for group in [shards] if rest else [[shard] for shard in shards]:
                for where, start, stop in _runs(place, group[0], num_rows):
                    views = [s.values[where].reshape(stop - start, -1) for s in group]
                    columns = [s.index[-1] if rest else slice(None) for s in group]
                    self._read(name, start, views, columns, added)

    def _read(
        self,
        name: str,
        start: int,
        views: Sequence[NDArray[Any]],
        columns: Sequence[slice],
        added: float,
    ) -> None:
        """Rows from `start` on, of each only the columns that the view has."""
        shape = self._source.tensors[name].shape
        num_rows, width = views[0].shape[0], int(np.prod(shape[1:]))
        is_whole = views[0].shape[1] == width
        if is_whole and not added and self._source.read_into(name, start, views[0]):
            return
        step = max(1, CHUNK_ELEMENTS // width)
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            rows = self._source.read(name, start + first, start + last).reshape(-1, width)
            if added:
                rows = rows.astype(np.float32) + np.float32(added)
            for view, part in zip(views, columns, strict=True):
                cast_into(view[first:last], rows[:, part], self._source.label, name)


def _runs(place: Place, shard: Shard, num_rows: int) -> Iterator[tuple[Any, int, int]]:
    """Where in the shard's values rows `start : stop` of the tensor go, in pairs with these.

    A layout with more blocks than the model has KV heads repeats each key and value and deals the
    query heads out.
    """
    if place.part == "whole":
        yield ..., shard.index[0].start, shard.index[0].stop
        return
    if place.part in ("gate", "up"):
        yield ("gate", "up").index(place.part), shard.index[1].start, shard.index[1].stop
        return
    num_blocks, group, head_dim = shard.of[0], shard.of[1] - 2, shard.of[2]
    first = shard.index[0].start
    for block in range(first, shard.index[0].stop):
        if place.part == "q":
            size, head = group * head_dim, block
            where: Any = (block - first, slice(0, group))
        else:
            size, head = head_dim, block * (num_rows // head_dim) // num_blocks
            where = (block - first, group + ("k", "v").index(place.part))
        yield where, head * size, (head + 1) * size
