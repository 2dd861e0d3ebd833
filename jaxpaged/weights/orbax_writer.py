"""Writes weights as an Orbax checkpoint, a part of them at a time."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.arrays import Params
from jaxpaged.sharding import TENSOR
from jaxpaged.weights.manifest import WeightRecord
from jaxpaged.weights.orbax import ITEM
from jaxpaged.weights.placing import path_of

MIN_GROUP_BYTES = 2**26
MOST_GROUPS = 64


def write_weights(
    folder: Path, abstract: Params, load: Callable[[Params], Params], num_parts: int
) -> dict[str, WeightRecord]:
    """Write the weights that `load` gives for any part of `abstract` into `folder`, and list them.

    `abstract` has shardings, whose split axes are stored in `num_parts` chunks, or in as many as
    divide them. The host holds a 64th of the weights at a time, or 64 MiB.
    """
    context = ocp.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False  # weights hardly shrink, and start-up counts
    context.array.saving.enable_write_sharding_file = False
    with context:
        for group in _groups(jax.tree.map(lambda leaf: _split(leaf, num_parts), abstract)):
            ocp.partial.save(str(folder), _with_text_keys(load(group)))
        ocp.partial.finalize(str(folder))
    assert (folder / ITEM).is_dir()
    leaves = jax.tree.leaves_with_path(abstract)
    return {path_of(keys): WeightRecord(leaf.shape, leaf.dtype.name) for keys, leaf in leaves}


def _split(leaf: jax.ShapeDtypeStruct, num_parts: int) -> jax.ShapeDtypeStruct:
    """The same weight split over as many CPU devices as it gets chunks."""
    assert isinstance(leaf.sharding, NamedSharding)
    spec = leaf.sharding.spec
    axis = spec.index(TENSOR) if TENSOR in spec else None
    devices = jax.local_devices(backend="cpu")[:num_parts]
    count = 1 if axis is None else math.gcd(leaf.shape[axis], len(devices))
    mesh = Mesh(np.array(devices[:count], dtype=object), (TENSOR,))
    split = NamedSharding(mesh, spec if count > 1 else PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)


def _groups(abstract: Params) -> Iterator[Params]:
    leaves = jax.tree.leaves_with_path(abstract)
    total = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    most, group, held = max(MIN_GROUP_BYTES, total // MOST_GROUPS), {}, 0
    for keys, leaf in leaves:
        size = leaf.size * leaf.dtype.itemsize
        if group and held + size > most:
            yield group
            group, held = {}, 0
        node: Any = group
        for entry in keys[:-1]:
            node = node.setdefault(entry.key, {})
        node[keys[-1].key] = leaf
        held += size
    if group:
        yield group


def _with_text_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {str(key): _with_text_keys(value) for key, value in tree.items()}
