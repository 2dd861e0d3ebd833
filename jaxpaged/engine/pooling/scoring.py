"""Pairs of texts to scores: by a classifier's own head, or the cosine of two embeddings."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpaged.core.similarity import classifier_scores, cosines
from jaxpaged.engine.pooling.inputs import EncodedText, PoolingInputs
from jaxpaged.errors import RequestError


class Pairs:
    """`texts` are what the model must see; `scores` makes scores of what it gave for them.

    Args:
        first: a text, or as many as `second` has.

    Raises:
        RequestError: numbers that do not go together, or a text that cannot be served.
    """

    def __init__(
        self,
        inputs: PoolingInputs,
        first: Any,
        second: Any,
        truncate: int | None,
        names: tuple[str, str] = ("text_1", "text_2"),
    ):
        many_first, many_second = _texts(first, names[0]), _texts(second, names[1])
        if len(many_first) not in (1, len(many_second)):
            raise RequestError(
                f"{names[0]} has {len(many_first)} texts and {names[1]} {len(many_second)}: give "
                f"one {names[0]}, or as many of both",
                param=names[0],
            )
        self._inputs, self._num_first = inputs, len(many_first)
        self._repeats = len(many_second) // len(many_first)
        if inputs.model.classifies:
            self.texts = [
                inputs.encode_pair(one, two, truncate=truncate, param=names[1])
                for one, two in zip(many_first * self._repeats, many_second, strict=True)
            ]
            self.pair_ids = [text.token_ids for text in self.texts]
            return
        firsts = [inputs.encode(t, truncate=truncate, param=names[0]) for t in many_first]
        seconds = [inputs.encode(t, truncate=truncate, param=names[1]) for t in many_second]
        self.texts: list[EncodedText] = firsts + seconds
        self.pair_ids = [
            one.token_ids + two.token_ids
            for one, two in zip(firsts * self._repeats, seconds, strict=True)
        ]

    @property
    def num_tokens(self) -> int:
        """What the model computes, a text that serves all pairs once."""
        return sum(len(text.token_ids) for text in self.texts)

    def scores(self, results: NDArray[np.float32]) -> list[float]:
        """One score a pair, from what the model gave for `texts`."""
        if self._inputs.model.classifies:
            return classifier_scores(self._inputs.model, results).tolist()
        return cosines(results[: self._num_first], results[self._num_first :]).tolist()


def _texts(given: Any, name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts:
        raise RequestError(f"{name} must be a text or a list of texts", param=name)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name} holds a {type(text).__name__}: give texts", param=name)
    return list(texts)
