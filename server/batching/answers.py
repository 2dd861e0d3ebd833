"""What a line of a batch may ask, by endpoint."""

from typing import Any

import msgspec

from jaxpaged.core.policies import BACKGROUND
from jaxpaged.errors import RequestError
from jaxpaged.generate.lines import CHAT, COMPLETIONS
from jaxpaged.openai import pooling
from jaxpaged.openai.answers import answer_body
from jaxpaged.openai.chunks import Usage
from jaxpaged.openai.responses.job import answer_response
from server.errors import HttpError
from server.state import ServerState

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)


async def answer(
    server: ServerState, endpoint: str, body: dict[str, Any], key_id: str
) -> dict[str, Any]:
    """The body that answers a line.

    Raises:
        RequestError: what can never be served.
    """
    try:
        if endpoint == EMBEDDINGS:
            return await _embeddings(server, body)
        named = body.get("model")
        model = server.check_model(named if named is None else str(named))
    except HttpError as error:
        raise RequestError(str(error), param=error.param) from None
    asker = {"model": model, "key_id": key_id}
    if endpoint == RESPONSES:
        return await answer_response(server.engine, body, priority=BACKGROUND, **asker)
    return await answer_body(
        server.engine, body, is_chat=endpoint == CHAT, priority=BACKGROUND, **asker
    )


async def _embeddings(server: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    read = pooling.read_embedding(msgspec.json.encode(body))
    engine, model = server.pooling_for(read.model, "embeddings")
    return await pooling.embeddings(read, engine, Usage(), model, is_background=True)
