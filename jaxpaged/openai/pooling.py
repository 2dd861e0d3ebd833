"""/v1/embeddings, /score and /rerank: bodies read, texts encoded, answers in vLLM's shapes."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxpaged.core.similarity import check_dimensions, ranked, shortened
from jaxpaged.engine.pooling.inputs import EncodedText
from jaxpaged.engine.pooling.scoring import Pairs
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import Envelope, Usage, encode
from jaxpaged.openai.schema import decode_body

MAX_INPUTS, MAX_DOCUMENTS = 2048, 10_000  # texts of one request; OpenAI's number, and Cohere's
MANY_NUMBERS = 16_384  # of vectors, whose writing takes some 2 ms
SHORT_TEXTS = 2048  # characters that are encoded at once: a thread costs more


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields that all three share."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None  # keep so many; -1: as many as fit
    user: str | None = None
    request_id: str | None = None  # the client's own; only echoed


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Body of /v1/embeddings."""

    input: Any  # text, token ids, or a list of either
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None  # one of the model's own prefixes


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of /score: one of four pairs of names for the same."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None  # instead of `documents`
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """Body of /rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None


SCORE_PAIRS = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
)  # fmt: skip
_EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


def read_embedding(data: bytes) -> EmbeddingRequest:
    return decode_body(data, _EMBEDDING)


def read_score(data: bytes) -> ScoreRequest:
    return decode_body(data, _SCORE)


def read_rerank(data: bytes) -> RerankRequest:
    return decode_body(data, _RERANK)


async def embeddings(
    body: EmbeddingRequest,
    pooling: ServedPooling,
    usage: Usage,
    model: str,
    *,
    is_background: bool = False,
) -> dict[str, Any]:
    """The answer to /v1/embeddings, in the background behind all that is not.

    Raises:
        RequestError: what can never be served.
    """
    if pooling.model.classifies:
        raise RequestError(
            f"the model {model!r} does not support embeddings: it scores pairs of texts by /score",
            param="model",
        )
    check_dimensions(pooling.model, body.dimensions)
    given = _texts(body.input)
    _check_number(given, MAX_INPUTS, "input")

    def encode() -> list[EncodedText]:
        return [
            pooling.inputs.encode(
                text,
                truncate=body.truncate_prompt_tokens,
                add_special_tokens=body.add_special_tokens is not False,
                prompt_name=body.prompt_name,
            )
            for text in given
        ]

    texts = await _encoded(encode, given)
    usage.add_prompt(sum(len(text.token_ids) for text in texts), 0)
    results = await pooling.run(texts, is_background=is_background)
    vectors = shortened(pooling.model, results, body.dimensions)
    write = partial(_written, vectors, body.encoding_format)
    written = await asyncio.to_thread(write) if vectors.size > MANY_NUMBERS else write()
    data = [
        {"index": index, "object": "embedding", "embedding": vector}
        for index, vector in enumerate(written)
    ]
    return _answer("embd", model, usage) | {"object": "list", "data": data}


async def scores(
    body: ScoreRequest, pooling: ServedPooling, usage: Usage, model: str
) -> dict[str, Any]:
    """The answer to /score. Raises what `embeddings` raises."""
    names = _score_pair(body)
    first, second = (getattr(body, name) for name in names)
    values = await _scores(pooling, usage, first, second, body, names)
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(values)
    ]
    return _answer("score", model, usage) | {"object": "list", "data": data}


def _score_pair(body: ScoreRequest) -> tuple[str, str]:
    """The names under which a body has its texts."""
    given = {name for pair in SCORE_PAIRS for name in pair if getattr(body, name) is not None}
    pair = next((pair for pair in SCORE_PAIRS if given == set(pair)), None)
    if pair is None:
        begun = next((pair for pair in SCORE_PAIRS if given and given < set(pair)), None)
        missing = next((name for name in begun or () if name not in given), None)
        pairs = ", ".join(" and ".join(pair) for pair in SCORE_PAIRS)
        raise RequestError(
            f"the texts to score are given as {' and '.join(sorted(given)) or 'nothing'}: "
            f"give one of these pairs: {pairs}",
            param=missing or min(given, default="text_1"),
        )
    return pair


async def reranked(
    body: RerankRequest, pooling: ServedPooling, usage: Usage, model: str
) -> dict[str, Any]:
    """The answer to /rerank, best first. Raises what `embeddings` raises."""
    documents = [_document(document) for document in body.documents]
    values = await _scores(pooling, usage, body.query, documents, body, ("query", "documents"))
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n is {body.top_n}, it must be 0 (all) or more", param="top_n")
    results = [
        {
            "index": index,
            "document": {"text": documents[index]},
            "relevance_score": values[index],
        }
        for index in ranked(values, body.top_n or len(values))
    ]
    return _answer("rerank", model, usage) | {"results": results}


async def _scores(
    pooling: ServedPooling,
    usage: Usage,
    first: Any,
    second: Any,
    body: PoolingFields,
    names: tuple[str, str],
) -> list[float]:
    for given, name in zip((first, second), names, strict=True):
        if isinstance(given, list):
            _check_number(cast("list[Any]", given), MAX_DOCUMENTS, name)

    def encode() -> Pairs:
        return Pairs(pooling.inputs, first, second, body.truncate_prompt_tokens, names)

    pairs = await _encoded(encode, [first, second])
    usage.add_prompt(pairs.num_tokens, 0)
    return pairs.scores(await pooling.run(pairs.texts))


async def _encoded[T](encode: Callable[[], T], given: Sequence[Any]) -> T:
    """Run `encode`, in a worker thread where there is much to encode."""
    num = sum(len(text) for text in given)
    nested = sum(len(text) for many in given if isinstance(many, list) for text in _strings(many))
    return await asyncio.to_thread(encode) if num + nested > SHORT_TEXTS else encode()


def _check_number(given: Sequence[Any], most: int, param: str) -> None:
    if len(given) > most:
        raise RequestError(
            f"{param} has {len(given)} texts, allowed are {most} in one request: send several",
            param=param,
        )


def _strings(many: list[Any]) -> list[str]:
    return [text for text in many if isinstance(text, str)]


def _texts(given: Any) -> list[str | list[int]]:
    """One text or several, each as text or token ids."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise RequestError(
            "input must be a text, a list of token ids, or a list of these, and not empty",
            param="input",
        )
    many = cast("list[Any]", given)
    if all(isinstance(item, int) for item in many):
        return [many]
    for item in many:
        if not isinstance(item, str | list):
            raise RequestError(
                f"input holds a {type(item).__name__}: give texts or lists of token ids",
                param="input",
            )
    return many


def _document(given: str | dict[str, Any]) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str):
        raise RequestError('documents must be texts, or objects with a "text"', param="documents")
    return text


def _written(vectors: NDArray[np.float32], form: str | None) -> list[Any]:
    """Vectors as JSON lists of numbers, or as base64 of their float32, low byte first."""
    if form == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return [msgspec.Raw(encode(row.tolist())) for row in vectors]


def _answer(prefix: str, model: str, usage: Usage) -> dict[str, Any]:
    envelope = Envelope.new(prefix, model)
    return {
        "id": envelope.answer_id,
        "created": envelope.created,
        "model": model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
