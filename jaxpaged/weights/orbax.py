"""Reads our Orbax checkpoints: of each weight only the chunks that a shard needs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from numpy.typing import NDArray

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.errors import WeightsError
from jaxpaged.weights.manifest import WEIGHTS, Manifest
from jaxpaged.weights.placing import Shard, path_of
from jaxpaged.weights.source import cast_into, clip, first_of, shape_text

ITEM = "state"  # Orbax's name for the tree in a checkpoint


class OrbaxReader:
    """Fills shards from the weights of one decoder, stored as it has them on one device."""

    def __init__(self, folder: Path):
        self._label = folder.name
        # several threads ask for whole chunks already: nothing is gained by keeping them
        self._context = tensorstore.Context()
        base = {"driver": "file", "path": f"{(folder / WEIGHTS / ITEM).resolve()}/"}
        self._files = {"driver": "ocdbt", "base": base}

    def fill(self, path: str, shards: Sequence[Shard]) -> None:
        try:
            store = self._open(path)
            for shard in shards:
                for where, index in _regions(shard, store.shape):
                    self._read(store, index, shard.values[where], path)
        except (ValueError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise WeightsError(clip(f"{self._label}: {path} cannot be read: {reason}")) from error

    def _open(self, path: str) -> Any:
        spec = {"driver": "zarr3", "kvstore": self._files | {"path": f"{path}/"}}
        return tensorstore.open(spec, read=True, context=self._context).result()

    def _read(self, store: Any, index: Sequence[slice], out: NDArray[Any], path: str) -> None:
        """Chunk after chunk, so that few are on their way beside what they go to."""
        for part in _chunks(index, store.chunk_layout.read_chunk.shape):
            sides = zip(part, index, strict=True)
            view = out[tuple(slice(p.start - i.start, p.stop - i.start) for p, i in sides)]
            if out.dtype == store.dtype.numpy_dtype:
                tensorstore.array(view).write(store[part]).result()
            else:
                cast_into(view, store[part].read().result(), self._label, path)


def check_tree(manifest: Manifest, abstract: Params, config: ModelConfig, label: str) -> None:
    """Compare the weights that are stored with those that the configuration needs.

    Raises:
        WeightsError: names the first misfits and counts the others.
    """
    problems, wanted = [], set()
    for keys, leaf in jax.tree.leaves_with_path(abstract):
        path = path_of(keys)
        wanted.add(path)
        found, shape = manifest.weights.get(path), leaf.shape
        if path.endswith(("qkv", "qkv_bias")):  # a layout may have repeated its KV heads
            shape = (config.kv_heads, config.heads // config.kv_heads + 2, *shape[2:])
        elif path.endswith(".table"):  # or added rows
            shape = (config.vocab, *shape[1:])
        if found is None:
            problems.append(f"{path} {shape_text(shape)} is missing")
        elif found.shape != shape:
            shapes = f"{shape_text(found.shape)}, expected {shape_text(shape)}"
            problems.append(f"{path} is {shapes} (from config.json)")
    extra = [path for path in manifest.weights if path not in wanted]
    problems.extend(f"{path} is unexpected in a {config.family} model" for path in extra)
    if problems:
        raise WeightsError(first_of(problems, label))


def _regions(shard: Shard, stored: tuple[int, ...]) -> Iterator[tuple[Any, tuple[slice, ...]]]:
    """Places in the shard's values, each with what is stored for it.

    They are all of it, but where KV heads are repeated: then each block of `qkv` has some of the
    query heads of a stored block, and its key and value.
    """
    if shard.of == stored:
        yield ..., shard.index
        return
    repeats, group = shard.of[0] // stored[0], shard.of[1] - 2
    first, rest = shard.index[0].start, shard.index[2:]
    for number in range(first, shard.index[0].stop):
        block, place = slice(number // repeats, number // repeats + 1), number % repeats
        local = slice(number - first, number - first + 1)
        queries = slice(place * group, (place + 1) * group)
        yield (local, slice(0, group)), (block, queries, *rest)
        yield (local, slice(group, group + 2)), (block, slice(stored[1] - 2, stored[1]), *rest)


def _chunks(index: Sequence[slice], chunk: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The parts of `index` that lie in one chunk each."""
    firsts = [part.start // size for part, size in zip(index, chunk, strict=True)]
    lasts = [-(-part.stop // size) for part, size in zip(index, chunk, strict=True)]
    counts = [last - first for first, last in zip(firsts, lasts, strict=True)]
    for place in np.ndindex(*counts):
        numbers = [first + n for first, n in zip(firsts, place, strict=True)]
        yield tuple(
            slice(max(part.start, n * size), min(part.stop, (n + 1) * size))
            for part, n, size in zip(index, numbers, chunk, strict=True)
        )
