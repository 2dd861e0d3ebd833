"""`LLM(..., runner="pooling")`: embeddings and scores in the calling thread."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.similarity import check_dimensions, shortened
from jaxpaged.engine.pooling.factory import PoolingParts, build_pooling_engine
from jaxpaged.engine.pooling.inputs import EncodedText, PoolingInput
from jaxpaged.engine.pooling.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxpaged.engine.pooling.scoring import Pairs
from jaxpaged.errors import RequestError

_ids = itertools.count()


@dataclass(frozen=True)
class PoolingParams:
    """How embeddings are made.

    `dimensions` shortens vectors of a Matryoshka model; `truncate_prompt_tokens` keeps so many
    tokens of a text, -1 as many as fit; `prompt_name` names one of the model's own prefixes.
    """

    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None


class OfflinePooling:
    """An embedding engine driven by the calling thread."""

    def __init__(self, parts: PoolingParts):
        self.parts = parts

    @classmethod
    def from_config(cls, config: EngineConfig) -> "OfflinePooling":
        return cls(build_pooling_engine(config))

    def embed(
        self, prompts: Sequence[PoolingInput], params: PoolingParams, *, use_tqdm: bool
    ) -> list[EmbeddingRequestOutput]:
        inputs, model = self.parts.inputs, self.parts.model
        if model.classifies:
            raise RequestError("the model does not support embeddings: it scores pairs of texts")
        check_dimensions(model, params.dimensions)
        texts = [
            inputs.encode(
                prompt,
                truncate=params.truncate_prompt_tokens,
                prompt_name=params.prompt_name,
                param="prompts",
            )
            for prompt in prompts
        ]
        vectors = shortened(model, self._run(texts, use_tqdm), params.dimensions)
        return [
            EmbeddingRequestOutput(f"embd-{next(_ids)}", EmbeddingOutput(row), text.token_ids)
            for row, text in zip(vectors.tolist(), texts, strict=True)
        ]

    def score(
        self, first: Any, second: Any, params: PoolingParams, *, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        pairs = Pairs(self.parts.inputs, first, second, params.truncate_prompt_tokens)
        scores = pairs.scores(self._run(pairs.texts, use_tqdm))
        return [
            ScoringRequestOutput(f"score-{next(_ids)}", ScoringOutput(score), ids)
            for score, ids in zip(scores, pairs.pair_ids, strict=True)
        ]

    def close(self) -> None:
        self.parts.engine.close()

    def _run(self, texts: Sequence[EncodedText], use_tqdm: bool) -> NDArray[np.float32]:
        engine, call_id = self.parts.engine, next(_ids)
        if not texts:
            return np.zeros((0, self.parts.model.size), np.float32)
        ids, seconds = [text.token_ids for text in texts], [text.second_from for text in texts]
        engine.add(call_id, ids, seconds)
        try:
            with tqdm(total=len(texts), desc="texts", unit="", disable=not use_tqdm) as bar:
                while True:
                    done = engine.step()
                    bar.update(len(texts) - engine.num_waiting - bar.n)
                    if done:
                        break
        finally:
            engine.drop(call_id)
        if done[0].error is not None:
            raise done[0].error
        return done[0].results
