"""Reads a BERT-type checkpoint into the encoder's weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jaxpaged.arrays import Params
from jaxpaged.config.architecture import EncoderConfig
from jaxpaged.models import bert
from jaxpaged.models.encoder import Encoder
from jaxpaged.models.fields import Fields
from jaxpaged.weights.dummy import random_params
from jaxpaged.weights.loader import check_fit
from jaxpaged.weights.pieces import CheckpointReader
from jaxpaged.weights.placing import Destination, place_params
from jaxpaged.weights.safetensors import SafetensorsSource
from jaxpaged.weights.source import renamed


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder ready to run: `nnx.merge(graphdef, params)` while tracing is it."""

    config: EncoderConfig
    graphdef: nnx.GraphDef
    params: Params


def load_encoder(
    path: Path,
    hf_config: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    is_dummy: bool = False,
    seed: int = 0,
    device: Destination = None,
) -> LoadedEncoder:
    """Read the encoder in `path`, or make random weights of its shape.

    Raises:
        ConfigError: the configuration cannot be served.
        WeightsError: the weights are damaged or do not fit it.
    """
    config = bert.translate(Fields(hf_config, path.name))
    model = nnx.eval_shape(lambda: Encoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    abstract = nnx.to_pure_dict(state)
    if is_dummy:
        return LoadedEncoder(config, graphdef, random_params(abstract, seed, device))
    source = renamed(SafetensorsSource(path), {"bert.": ""})
    places = bert.weight_names(config)
    check_fit(source, places, config, unused=bert.UNUSED)
    reader = CheckpointReader(source, places, norm_plus_one=False)
    return LoadedEncoder(config, graphdef, place_params(abstract, reader, device))
