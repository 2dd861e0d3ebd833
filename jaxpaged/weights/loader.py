"""Reads a checkpoint into the decoder's weights, or says in one line why it does not fit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import EncoderConfig, ModelConfig
from jaxpaged.errors import WeightsError
from jaxpaged.layers.attention import AttentionOp, paged_attention
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.family import AXES, Place, weight_names
from jaxpaged.models.registry import find_family, model_config
from jaxpaged.sharding import Placement, abstract_params, laid_out
from jaxpaged.weights.dummy import random_params
from jaxpaged.weights.gguf import GgufSource
from jaxpaged.weights.manifest import Manifest, digests_checked, read_manifest
from jaxpaged.weights.orbax import OrbaxReader, check_tree
from jaxpaged.weights.pieces import CheckpointReader
from jaxpaged.weights.placing import Destination, PaddedVocab, Reader, place_params
from jaxpaged.weights.resolve import LoadFormat, find_checkpoint, read_config
from jaxpaged.weights.safetensors import SafetensorsSource
from jaxpaged.weights.source import TensorSource, first_of, merged, renamed, shape_text

IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias", ".position_ids", "rope_freqs.weight")
DRAFT = "draft"  # its weights among those of a model
# beginnings of names in checkpoints of a model without its head, and what they are otherwise
_NAMES_OF_BASE = {name: f"model.{name}" for name in ("embed_tokens.", "layers.", "norm.")}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: `nnx.merge(graphdef, params)` while tracing is its decoder."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Params
    hf_config: dict[str, Any]  # with the overrides put in
    path: Path  # folder, or GGUF file
    draft: "LoadedModel | None" = None  # guesses tokens for it

    @property
    def all_params(self) -> Params:
        """The weights, those of a draft model as one entry more."""
        return _with_draft(self.params, self.draft)


@dataclass(frozen=True)
class ModelFiles:
    """A model of which only the configuration was read; `params` are shapes with their places."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Params
    hf_config: dict[str, Any]
    path: Path
    gguf: GgufSource | None
    manifest: Manifest | None  # of an Orbax checkpoint
    is_dummy: bool
    draft: "ModelFiles | None" = None

    @property
    def all_params(self) -> Params:
        return _with_draft(self.params, self.draft)

    def load(self, seed: int = 0, device: Destination = None) -> LoadedModel:
        """Read the weights, or make random ones from `seed`, each onto the sharding that it names.

        Those that name none go to `device`.

        Raises:
            WeightsError: the weights are damaged or do not fit the configuration.
        """
        if self.is_dummy:
            params = random_params(self.params, seed, device)
        else:
            with self.reading() as reader:
                params = place_params(self.params, PaddedVocab(reader, self.config.vocab), device)
        draft = self.draft and self.draft.load(seed, device)
        return LoadedModel(self.config, self.graphdef, params, self.hf_config, self.path, draft)

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """What fills shards of any of the weights. Raises what `load` raises, also at the end."""
        if self.manifest is not None:
            with digests_checked(self.path, self.manifest):
                yield OrbaxReader(self.path)
            return
        source = self._source()
        places = weight_names(find_family(self.hf_config, self.path.name), self.config)
        check_fit(source, places, self.config)
        yield CheckpointReader(source, places, self.config.norm_plus_one)

    def stored_dtype(self) -> str:
        """The type that holds every matrix as it is stored, float32 where they are quantised."""
        if self.manifest is not None:
            return self.manifest.weights["embedding.table"].dtype
        tensors = self._source().tensors.values()
        found = {info.dtype for info in tensors if len(info.shape) > 1}
        names = {"BF16": "bfloat16", "F16": "float16"}
        return names.get(found.pop(), "float32") if len(found) == 1 else "float32"

    def _source(self) -> TensorSource:
        return self.gguf or renamed(SafetensorsSource(self.path), _NAMES_OF_BASE)


def _with_draft(params: Params, draft: LoadedModel | ModelFiles | None) -> Params:
    return params if draft is None else params | {DRAFT: draft.params}


def open_model(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike,
    load_format: LoadFormat = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    attend: AttentionOp = paged_attention,
    placement: Placement | None = None,
) -> ModelFiles:
    """Find a folder, a GGUF file or a model of the hub, and read what it is, no weights.

    Args:
        dtype: of weights and activations; norms stay float32.
        load_format: `dummy` makes random weights of the configuration's shape.
        hf_overrides: put over the checkpoint's configuration, nested mappings entry by entry.
        placement: the devices that the weights are meant for, None for one.

    Raises:
        ConfigError: the configuration cannot be served, or not on these devices.
        WeightsError: the weights are in no format that is read.
    """
    checkpoint = find_checkpoint(path_or_id, load_format, revision, download_dir)
    gguf = GgufSource(checkpoint.path) if checkpoint.kind == "gguf" else None
    hf_config = read_config(checkpoint.path) if gguf is None else gguf.hf_config
    hf_config = merged(hf_config, hf_overrides or {})
    config = model_config(hf_config, checkpoint.path.name)
    if checkpoint.kind != "safetensors":
        config = replace(config, norm_plus_one=False)
    stored = config if placement is None else laid_out(config, placement.num_shards)
    graphdef, abstract = abstract_model(stored, attend, dtype, placement)
    manifest, is_dummy = None, load_format == "dummy"
    if checkpoint.kind == "orbax" and not is_dummy:
        manifest = read_manifest(checkpoint.path)
        check_tree(manifest, abstract, config, checkpoint.path.name)
    path = checkpoint.path
    return ModelFiles(config, graphdef, abstract, hf_config, path, gguf, manifest, is_dummy)


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


def check_fit(
    source: TensorSource,
    places: Mapping[str, Place],
    config: ModelConfig | EncoderConfig,
    unused: tuple[str, ...] = (),
) -> None:
    """Compare what the checkpoint holds with what the configuration needs.

    Args:
        unused: beginnings of names that may be there for other uses of the model.

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
        if name not in known and not name.startswith(unused) and not name.endswith(IGNORED_ENDINGS)
    )
    if problems:
        raise WeightsError(first_of(problems, source.label))


def _misshapen(
    name: str, found: tuple[int, ...], place: Place, config: ModelConfig | EncoderConfig
) -> str:
    expected = place.shape(config)
    pairs = zip(place.axes, expected, found, strict=False)
    wrong = [axis for axis, want, got in pairs if want != got] or list(place.axes)
    fields = ", ".join(AXES[axis][1] for axis in dict.fromkeys(wrong))
    return f"{name} is {shape_text(found)}, expected {shape_text(expected)} (from {fields})"
