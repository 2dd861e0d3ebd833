"""POST /v1/embeddings, /score and /rerank: vectors of texts, and how well texts go together."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.openai import pooling
from jaxpaged.openai.chunks import Usage, encode
from server.bodies import read_body
from server.state import SERVER

type Answer[T] = Callable[[T, ServedPooling, Usage, str], Awaitable[dict[str, Any]]]


async def embeddings(request: web.Request) -> web.Response:
    return await _answered(request, pooling.read_embedding, pooling.embeddings, "embeddings")


async def score(request: web.Request) -> web.Response:
    return await _answered(request, pooling.read_score, pooling.scores, "scores")


async def rerank(request: web.Request) -> web.Response:
    return await _answered(request, pooling.read_rerank, pooling.reranked, "reranking")


async def _answered[T: pooling.PoolingFields](
    request: web.Request, read: Callable[[bytes], T], answer: Answer[T], what: str
) -> web.Response:
    server = request.app[SERVER]
    with server.work(request) as usage:
        body = read(await read_body(request))
        engine, model = server.pooling_for(body.model, what)
        fields = await answer(body, engine, usage, model)
        return web.Response(body=encode(fields), content_type="application/json")
