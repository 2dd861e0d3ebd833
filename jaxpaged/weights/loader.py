"""Reads a checkpoint into the decoder's weights, or says in one line why it does not fit."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.errors import WeightsError
from jaxpaged.layers.attention import AttentionOp, paged_attention
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.family import AXES, Place, weight_names
from jaxpaged.models.registry import find_family, model_config
from jaxpaged.sharding import Placement, abstract_params
from jaxpaged.weights.dummy import Destination, random_params
from jaxpaged.weights.gguf import GgufSource
from jaxpaged.weights.resolve import LoadFormat, find_checkpoint, read_config
from jaxpaged.weights.safetensors import SafetensorsSource
from jaxpaged.weights.source import TensorSource, clip, first_of, shape_text

IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias", ".position_ids", "rope_freqs.weight")
CHUNK_ELEMENTS = (
    2**24
)  # read at a time, so that a large dequantised tensor is never whole in memory
MAX_THREADS = 4


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: `nnx.merge(graphdef, params)` while tracing is its decoder."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Params
    hf_config: dict[str, Any]  # with the overrides put in
    path: Path  # folder, or GGUF file


@dataclass(frozen=True)
class ModelFiles:
    """A model of which only the configuration was read; `params` are shapes."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Params
    hf_config: dict[str, Any]
    path: Path
    gguf: GgufSource | None
    is_dummy: bool

    def load(self, seed: int = 0, device: Destination = None) -> LoadedModel:
        """Read the weights onto the device, or make random ones from `seed`.

        Raises:
            WeightsError: the weights are damaged or do not fit the configuration.
        """
        config = self.config
        if self.is_dummy:
            params = random_params(self.params, seed, device)
        else:
            source = self.gguf or SafetensorsSource(self.path)
            places = weight_names(find_family(self.hf_config, self.path.name), config)
            check_fit(source, places, config)
            params = _read_params(source, places, self.params, config, device)
        return LoadedModel(config, self.graphdef, params, self.hf_config, self.path)


def open_model(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike,
    load_format: LoadFormat = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    attend: AttentionOp = paged_attention,
) -> ModelFiles:
    """Find a folder, a GGUF file or a model of the hub, and read what it is, no weights.

    Args:
        dtype: of weights and activations; norms stay float32.
        load_format: `dummy` makes random weights of the configuration's shape.
        hf_overrides: put over the checkpoint's configuration, nested mappings entry by entry.

    Raises:
        ConfigError: the configuration cannot be served.
        WeightsError: the weights are in no format that is read.
    """
    checkpoint = find_checkpoint(path_or_id, load_format, revision)
    gguf = GgufSource(checkpoint.path) if checkpoint.is_gguf else None
    hf_config = read_config(checkpoint.path) if gguf is None else gguf.hf_config
    hf_config = merged(hf_config, hf_overrides or {})
    config = model_config(hf_config, checkpoint.path.name)
    if gguf is not None:
        config = replace(config, norm_plus_one=False)
    graphdef, abstract = abstract_model(config, attend, dtype)
    is_dummy = load_format == "dummy"
    return ModelFiles(config, graphdef, abstract, hf_config, checkpoint.path, gguf, is_dummy)


def load_model(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike,
    load_format: LoadFormat = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    seed: int = 0,
    attend: AttentionOp = paged_attention,
    device: Destination = None,
) -> LoadedModel:
    """`open_model`, and its weights onto the device. Raises what either raises."""
    files = open_model(
        path_or_id,
        dtype=dtype,
        load_format=load_format,
        hf_overrides=hf_overrides,
        revision=revision,
        attend=attend,
    )
    return files.load(seed, device)


def abstract_model(
    config: ModelConfig,
    attend: AttentionOp,
    dtype: DTypeLike,
    placement: Placement | None = None,
) -> tuple[nnx.GraphDef, Params]:
    """The decoder's structure, and its weights as shapes with their shardings: nothing is there.

    With a placement `config` is the one of `sharding.laid_out`.
    """
    model = nnx.eval_shape(lambda: Decoder(config, attend, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    return graphdef, abstract_params(state, config.num_layers, placement)


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Put `overrides` over `config`; mappings in both are merged."""
    result = dict(config)
    for name, value in overrides.items():
        old = result.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[name] = merged(old, value) if both else value  # pyright: ignore[reportArgumentType]
    return result


def check_fit(source: TensorSource, places: Mapping[str, Place], config: ModelConfig) -> None:
    """Compare what the checkpoint holds with what the configuration needs.

    Raises:
        WeightsError: names the first misfits and counts the others.
    """
    problems = []
    for name, place in places.items():
        if name not in source.tensors:
            problems.append(f"{name} {shape_text(place.shape(config))} is missing")
        elif source.tensors[name].shape != place.shape(config):
            problems.append(_misshapen(name, source.tensors[name].shape, place, config))
    known = set(places) | ({"lm_head.weight"} if config.tied_embeddings else set())
    problems.extend(
        f"{name} {shape_text(info.shape)} is unexpected in a {config.family} model"
        for name, info in source.tensors.items()
        if name not in known and not name.endswith(IGNORED_ENDINGS)
    )
    if problems:
        raise WeightsError(first_of(problems, source.label))


def _misshapen(name: str, found: tuple[int, ...], place: Place, config: ModelConfig) -> str:
    expected = place.shape(config)
    pairs = zip(place.axes, expected, found, strict=False)
    wrong = [axis for axis, want, got in pairs if want != got] or list(place.axes)
    fields = ", ".join(AXES[axis][1] for axis in dict.fromkeys(wrong))
    return f"{name} is {shape_text(found)}, expected {shape_text(expected)} (from {fields})"


def _read_params(
    source: TensorSource,
    places: Mapping[str, Place],
    abstract: Params,
    config: ModelConfig,
    device: Destination,
) -> Params:
    """Fill one weight after another on the host and send it off, a few at a time."""
    pieces: dict[str, list[tuple[str, Place]]] = defaultdict(list)
    for name, place in places.items():
        pieces[place.path].append((name, place))

    def load(path: str) -> tuple[str, jax.Array]:
        shape = _leaf(abstract, path)
        target = np.empty(shape.shape, shape.dtype)
        added = 1.0 if config.norm_plus_one and path.endswith(".scale") else 0.0
        for name, place in pieces[path]:
            _fill(_part(target, place), source, name, added)
        return path, jax.device_put(target, device)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return _nested(threads.map(load, pieces))


def _part(target: NDArray[Any], place: Place) -> NDArray[Any]:
    """The view of a fused weight that a checkpoint's tensor fills."""
    if place.part == "whole":
        return target
    if place.part in ("gate", "up"):
        return target[0 if place.part == "gate" else 1]
    group = target.shape[1] - 2
    return target[:, {"q": slice(0, group), "k": group, "v": group + 1}[place.part]]


def _fill(view: NDArray[Any], source: TensorSource, name: str, added: float) -> None:
    num_rows, *rest = source.tensors[name].shape
    is_split = view.shape != source.tensors[name].shape
    step = num_rows if is_split else max(1, CHUNK_ELEMENTS // max(1, int(np.prod(rest))))
    for start in range(0, num_rows, step):
        rows = source.read(name, start, min(start + step, num_rows))
        if added:
            rows = rows.astype(np.float32) + np.float32(added)
        place = view if is_split else view[start : start + step]
        with np.errstate(over="raise"):
            try:
                place[...] = rows.reshape(place.shape)
            except FloatingPointError as error:
                problem = f"{name} has values over {view.dtype}: take bfloat16 or float32"
                raise WeightsError(clip(f"{source.label}: {problem}")) from error


def _leaf(params: Params, path: str) -> jax.ShapeDtypeStruct:
    node: Any = params
    for key in path.split("."):
        node = node[int(key) if key.isdigit() else key]
    return node


def _nested(leaves: Iterable[tuple[str, jax.Array]]) -> Params:
    params: Params = {}
    for path, leaf in leaves:
        *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
        node: Any = params
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = leaf
    return params
