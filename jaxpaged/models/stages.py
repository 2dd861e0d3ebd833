"""A decoder cut into stages, each with its layers on devices of its own.

The first has the embedding, the last the norm and the head: with tied embeddings a second copy of
the table. A stage is a `Decoder` that lacks the rest.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.sharding import Placement

type StageKind = Literal["whole", "first", "inner", "last"]


@dataclass(frozen=True)
class Stage:
    """A part of a model; `whole` where it is not cut. `model` has its layers alone."""

    kind: StageKind
    graphdef: nnx.GraphDef
    params: Params
    model: ModelConfig
    mesh: Mesh | None


def split_model(
    model: ModelConfig, graphdef: nnx.GraphDef, params: Params, placement: Placement | None
) -> list[Stage]:
    """The stages of a model whose `params` are arrays on their devices, or shapes that name them.

    Arrays stay where they are and are shared with `params`, but for the last stage's copy of a tied
    embedding.
    """
    meshes = (None,) if placement is None else placement.stages
    if len(meshes) == 1:
        return [Stage("whole", graphdef, params, model, meshes[0])]
    assert placement is not None
    stages: list[Stage] = []
    for number, mesh in enumerate(placement.stages):
        kind: StageKind = "inner" if number else "first"
        if number == len(meshes) - 1:
            kind = "last"
        layers = placement.layers_of(number, model.num_layers)
        part = replace(model, layer_kinds=model.layer_kinds[layers.start : layers.stop])
        stages.append(Stage(kind, *_cut(kind, graphdef, params, layers, mesh), part, mesh))
    return stages


def _cut(
    kind: StageKind, graphdef: nnx.GraphDef, params: Params, layers: range, mesh: Mesh
) -> tuple[nnx.GraphDef, Params]:
    model: Any = nnx.merge(graphdef, params)  # a `Decoder`, of which parts are taken away
    kinds = model.config.layer_kinds[layers.start : layers.stop]
    model.config = replace(model.config, layer_kinds=kinds)
    model.layers = nnx.List([model.layers[i] for i in layers])
    is_tied_head = kind == "last" and model.config.tied_embeddings
    if kind != "last":
        model.norm = model.lm_head = None
    if kind != "first" and not is_tied_head:
        model.embedding = None
    graphdef, weights = nnx.split(model)
    params = nnx.to_pure_dict(weights)
    if is_tied_head:
        params["embedding"] = jax.tree.map(partial(_moved, mesh=mesh), params["embedding"])
    return graphdef, params


def _moved(x: Any, mesh: Mesh) -> Any:
    """An array, or its shape, split in the same way over the devices of another stage."""
    sharding = NamedSharding(mesh, x.sharding.spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
