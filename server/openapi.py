"""GET /openapi.json: the routes with the very schemas that read their bodies."""

import re
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from jaxpaged import __version__
from jaxpaged.anthropic.schema import CountRequest, MessagesRequest
from jaxpaged.openai.chunks import AnswerMetrics, encode
from jaxpaged.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from jaxpaged.openai.responses.schema import ResponsesRequest
from jaxpaged.openai.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    PrefixRequest,
    TokenizeRequest,
)
from server.auth import OPEN_ROUTES
from server.batching.requests import BatchRequest
from server.invocations import HANDLERS
from server.state import SERVER

BODIES: dict[str, type[msgspec.Struct]] = {
    "completions": CompletionRequest,
    "chat_completions": ChatRequest,
    "embeddings": EmbeddingRequest,
    "score": ScoreRequest,
    "scorev1": ScoreRequest,
    "rerank": RerankRequest,
    "rerankv1": RerankRequest,
    "rerankv2": RerankRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "generate": GenerateRequest,
    "prefixes": PrefixRequest,
    "abort_requests": AbortRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountRequest,
    "batches": BatchRequest,
}
TIMED = ("completions", "chat_completions", "responses")
INVOKED = {name for name, _ in HANDLERS.values()}
FORMS: dict[str, dict[str, Any]] = {
    "files": {
        "type": "object",
        "properties": {
            "purpose": {"const": "batch"},
            "file": {"type": "string", "format": "binary"},
        },
        "required": ["purpose", "file"],
    }
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


class TimedAnswer(msgspec.Struct):
    """An answer, of whose many fields this one is not OpenAI's. It is null with several answers,
    and absent with --no-enable-per-request-metrics.
    """

    metrics: AnswerMetrics | None = None


async def openapi(request: web.Request) -> web.Response:
    document = _document(request.app, request.app[SERVER].limits.root_path)
    return web.Response(body=document, content_type="application/json")


@cache
def _document(app: web.Application, root_path: str) -> bytes:
    (answer, *schemas), components = msgspec.json.schema_components(
        (TimedAnswer, *BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    body_of = dict(zip(BODIES, schemas, strict=True))
    body_of["invocations"] = {"anyOf": [body_of[name] for name in sorted(INVOKED)]}
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        resource = route.resource
        name = None if resource is None else resource.name
        if resource is None or name is None or name.endswith(".root") or route.method == "HEAD":
            continue
        operation = _operation(name, body_of.get(name) if route.method == "POST" else None)
        if name in TIMED and route.method == "POST":
            operation["responses"]["200"]["content"] = {"application/json": {"schema": answer}}
        if name in FORMS and route.method == "POST":
            content = {"multipart/form-data": {"schema": FORMS[name]}}
            operation["requestBody"] = {"required": True, "content": content}
        path = resource.canonical
        if "{" in path:
            operation["parameters"] = [
                {"name": part, "in": "path", "required": True, "schema": {"type": "string"}}
                for part in re.findall(r"{(\w+)}", path)
            ]
        paths.setdefault(path, {})[route.method.lower()] = operation
    return encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "jaxpaged", "version": __version__},
            "servers": [{"url": root_path or "/"}],
            "paths": paths,
            "components": {
                "schemas": components | {"Error": ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(name: str, body: dict[str, Any] | None) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    operation: dict[str, Any] = {
        "operationId": name,
        "security": [] if name in OPEN_ROUTES else [{"key": []}],
        "responses": {
            "200": {"description": "done"},
            "default": {"description": "refused", "content": {"application/json": error}},
        },
    }
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
