"""What is done with vectors once they are there: shorten, compare, rank."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxpaged.config.pooling import PoolingModel
from jaxpaged.errors import RequestError

type Vectors = NDArray[np.float32]


def check_dimensions(model: PoolingModel, dimensions: int | None) -> None:
    """Refuse a length that vectors of this model cannot be shortened to.

    Raises:
        RequestError: not allowed, or the model was not trained for shorter vectors.
    """
    if dimensions is None or dimensions == model.size:
        return
    if not model.is_matryoshka:
        raise RequestError(
            f"dimensions is {dimensions}: this model's vectors of {model.size} numbers do not keep "
            "their meaning when they are cut; leave it out, or have the operator start with "
            "--hf-overrides '{\"is_matryoshka\": true}'",
            param="dimensions",
        )
    allowed = model.dimensions
    if dimensions not in allowed if allowed else not 1 <= dimensions <= model.size:
        known = ", ".join(map(str, allowed)) if allowed else f"1 to {model.size}"
        raise RequestError(f"dimensions is {dimensions}, allowed are {known}", param="dimensions")


def shortened(model: PoolingModel, vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first `dimensions` numbers, of length 1 again where the model's vectors are."""
    if dimensions is None or dimensions == model.size:
        return vectors
    vectors = vectors[:, :dimensions]
    return _of_length_1(vectors) if model.normalize else vectors


def cosines(first: Vectors, second: Vectors) -> NDArray[np.float32]:
    """The cosine of each row of one with the same row of the other; one row may serve all."""
    return (_of_length_1(first) * _of_length_1(second)).sum(axis=-1)


def classifier_scores(model: PoolingModel, logits: Vectors) -> NDArray[np.float32]:
    """Scores of a classifier with one label."""
    values = logits[:, 0]
    return (1 / (1 + np.exp(-values))).astype(np.float32) if model.sigmoid else values


def ranked(scores: Sequence[float], most: int) -> list[int]:
    """Places of the best scores, best first; the earlier one of equals first."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:most]


def _of_length_1(vectors: Vectors) -> Vectors:
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
