"""POST /invocations, which Amazon SageMaker calls: whatever its body asks for."""

from aiohttp import web
from msgspec import Raw, json

from jaxpaged.errors import RequestError
from jaxpaged.openai.pooling import SCORE_PAIRS
from jaxpaged.openai.schema import decode_body
from server import chat, completions, embeddings
from server.bodies import keep_body
from server.errors import Handler

# by the first of these fields that a body has; a rerank's `documents` are a score's too
HANDLERS: dict[str, tuple[str, Handler]] = {
    "messages": ("chat_completions", chat.chat_completions),
    "prompt": ("completions", completions.completions),
    "input": ("embeddings", embeddings.embeddings),
    "query": ("rerank", embeddings.rerank),
    **{first: ("score", embeddings.score) for first, _ in SCORE_PAIRS},
}
_FIELDS = json.Decoder(dict[str, Raw])


async def invocations(request: web.Request) -> web.StreamResponse:
    given = decode_body(await keep_body(request), _FIELDS)
    for field, (_, handler) in HANDLERS.items():
        if bytes(given.get(field, b"null")) != b"null":
            return await handler(request)
    raise RequestError(f"the body has none of {', '.join(HANDLERS)}: what it asks for is not clear")
