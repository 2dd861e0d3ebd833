"""Where weights and KV live on several devices: one table, and what a layer needs while traced.

A weight names what its axes mean (`axes=("embed", "ffn")`, kept with the `nnx.Param`), and
`MESH_AXES` alone says which of these names are split: whatever comes later, quantised weights and
their scales, adapters, experts, is placed by naming its axes. An axis in groups or packed keeps its
name; what is not split is on every device.

A model runs on a `Placement`: pipeline stages in order, each a mesh with the one axis `TENSOR`.
None stands for one default device, whose programs know no mesh. Each program is one `jax.shard_map`
over all that a stage does, so that traced code sees a device's share of every array, and the
collectives are those written: `sum_shards` and its like, which do nothing where no mesh is.

KV heads that are fewer than the devices are repeated: `laid_out` is the model as its weights are
stored then, with `kv_heads` equal to the number of devices. Axis 0 of `qkv` and of `qkv_bias` is
the only one that this changes: `repeat_kv_heads` turns theirs of the model into those of a layout.
A vocabulary that does not divide gets rows of zeros at its end there, whose logits are -inf.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.config.settings import ParallelSettings
from jaxpaged.errors import ConfigError

TENSOR = "tensor"
VOCAB_ALIGNMENT = 64  # rows; of a device's part of a vocabulary that had to be padded

MESH_AXES: dict[str, str | None] = {
    "vocab": TENSOR,
    "heads": TENSOR,  # query heads; also heads times head_dim, where both are one axis
    "kv_heads": TENSOR,
    "ffn": TENSOR,
    "experts": None,  # every device has its part of each expert's ffn
    "embed": None,
    "head_dim": None,
    "blocks": None,  # a KV head's query heads, key and value
    "gate_up": None,
    "rank": None,  # of an adapter
    "pages": None,
    "places": None,  # in a page
    "slots": None,
}
"""The mesh axis that each logical axis is split over, or None."""


@dataclass(frozen=True)
class Placement:
    """The devices of one engine: for each pipeline stage, in order, a mesh of its own."""

    stages: tuple[Mesh, ...]

    @property
    def num_shards(self) -> int:
        """Devices that share each layer."""
        return self.stages[0].size

    @property
    def devices(self) -> list[Any]:
        return [device for mesh in self.stages for device in mesh.devices.flat]

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of a stage, see `layers_of_stages`."""
        return layers_of_stages(num_layers, len(self.stages))[stage]

    def stage_of(self, path: Sequence[str | int], num_layers: int) -> int:
        """The stage that holds the weight at `path`, its keys in the nested weights."""
        if path[0] == "layers":
            places = range(len(self.stages))
            return next(s for s in places if int(path[1]) in self.layers_of(s, num_layers))
        return 0 if path[0] == "embedding" else len(self.stages) - 1

    def of_weight(
        self, path: Sequence[str | int], axes: Sequence[str | None], num_layers: int
    ) -> NamedSharding:
        """Where the weight at `path` lives, whose axes mean `axes`."""
        return NamedSharding(self.stages[self.stage_of(path, num_layers)], spec_of(axes))


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """As even as they come; of what is over the last stage, which has the head, gets nothing."""
    ends = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def make_placement(
    parallel: ParallelSettings, devices: Sequence[Any] | None = None
) -> Placement | None:
    """The meshes that the settings ask for, of the first of `devices` (default: all of JAX's).

    None where that is the one device that JAX takes by itself.

    Raises:
        ConfigError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    num_shards, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    wanted = parallel.num_devices
    if wanted > len(devices):
        raise ConfigError(
            f"--tensor-parallel-size {num_shards} x --pipeline-parallel-size {num_stages} needs "
            f"{wanted} devices, there are {len(devices)}: lower one of them"
        )
    if wanted == 1 and devices[0] == jax.devices()[0]:
        return None
    grid = np.array(devices[:wanted], dtype=object).reshape(num_stages, num_shards)
    return Placement(tuple(Mesh(row, (TENSOR,)) for row in grid))


def planned_placement(parallel: ParallelSettings) -> Placement | None:
    """The same of devices that need not be here, for shapes alone."""
    if parallel.num_devices == 1:
        return None
    mesh = cast("Mesh", AbstractMesh((parallel.tensor_parallel_size,), (TENSOR,)))
    return Placement((mesh,) * parallel.pipeline_parallel_size)


def keys_of(path: Sequence[Any]) -> tuple[str | int, ...]:
    """A path of `jax.tree.leaves_with_path` as plain keys."""
    return tuple(entry.key for entry in path)


def spec_of(axes: Sequence[str | None]) -> PartitionSpec:
    """How an array is split whose axes mean `axes`; None is an axis that no table knows."""
    split = [None if axis is None else MESH_AXES[axis] for axis in axes]
    while split and split[-1] is None:
        split.pop()  # so that equal splits are equal specs
    return PartitionSpec(*split)


def abstract_params(state: nnx.State, num_layers: int, placement: Placement | None) -> Params:
    """The weights of a split module as shapes, each with the sharding that its axes give.

    What loads them puts each leaf onto its own `sharding` and needs to know nothing else; without a
    placement there is none. Raises KeyError where an axis has a name that `MESH_AXES` lacks.
    """
    params = nnx.to_pure_dict(state)
    if placement is None:
        return params
    variables = dict(nnx.to_flat_state(state))

    def shape(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keys = keys_of(path)
        axes = variables[keys].get_metadata("axes")
        sharding = placement.of_weight(keys, axes, num_layers)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(shape, params)


def laid_out(model: ModelConfig, num_shards: int) -> ModelConfig:
    """The model as its weights and pages are stored for `num_shards` devices.

    Raises:
        ConfigError: its sizes do not divide.
    """
    problem = _misfit(model, num_shards)
    if problem:
        sizes = [n for n in range(1, model.heads + 1) if not _misfit(model, n)]
        raise ConfigError(
            f"--tensor-parallel-size is {num_shards}, which does not divide the model's "
            f"{problem}: this model can take {', '.join(map(str, sizes))}"
        )
    padding = -model.vocab % (VOCAB_ALIGNMENT * num_shards) if model.vocab % num_shards else 0
    return replace(
        model,
        kv_heads=max(model.kv_heads, num_shards),
        vocab=model.vocab + padding,
        vocab_padding=padding,
    )


def repeat_kv_heads(fused: Any, kv_heads: int) -> Any:
    """`qkv` or `qkv_bias` of a model for a layout of `kv_heads`, as NumPy or JAX array.

    Each block of `[kv_heads, group + 2, head_dim, ...]` becomes several with a part of its query
    heads each and with its key and its value.
    """
    repeats = kv_heads // fused.shape[0]
    if repeats == 1:
        return fused
    group = fused.shape[1] - 2
    xp = np if isinstance(fused, np.ndarray) else jax.numpy
    queries = fused[:, :group].reshape(kv_heads, group // repeats, *fused.shape[2:])
    return xp.concatenate([queries, xp.repeat(fused[:, group:], repeats, axis=0)], axis=1)


def is_split() -> bool:
    """Whether the code being traced sees one device's share."""
    return TENSOR in jax.sharding.get_abstract_mesh().manual_axes


def split_axis() -> str | None:
    """`TENSOR` where the code being traced sees one device's share, for ops that take an axis."""
    return TENSOR if is_split() else None


def sum_shards(x: Array) -> Array:
    """The sum over the devices that share a layer: an all-reduce."""
    return jax.lax.psum(x, TENSOR) if is_split() else x


def num_shards() -> int:
    """How many devices share a layer."""
    return jax.lax.axis_size(TENSOR) if is_split() else 1


def shard_index() -> Array | int:
    """The place of this device among those that share a layer."""
    return jax.lax.axis_index(TENSOR) if is_split() else 0


def local_ids(ids: Array, size: int) -> Array:
    """Ids of the whole as places in this device's `size`; elsewhere `size`, which `.at` drops."""
    if not is_split():
        return ids
    places = ids - shard_index() * size
    return jax.numpy.where((places >= 0) & (places < size), places, size)


def hide_padding(logits: Array, padding: int) -> Array:
    """-inf for the last `padding` columns of the whole, of which this may be a device's part."""
    if not padding:
        return logits
    size = logits.shape[1]
    whole = size * num_shards()
    places = shard_index() * size + jax.numpy.arange(size)
    return jax.numpy.where((places < whole - padding)[None], logits, -jax.numpy.inf)


def _misfit(model: ModelConfig, num_shards: int) -> str:
    for name in ("heads", "ffn"):
        if getattr(model, name) % num_shards:
            return f"{name} of {getattr(model, name)}"
    if model.kv_heads % num_shards and num_shards % model.kv_heads:
        return f"kv_heads of {model.kv_heads}"
    return ""
