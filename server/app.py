"""The web application: routes, and what every request passes through."""

import time
from collections.abc import Sequence

from aiohttp import web

from jaxpaged.openai.engine import ServedEngine
from jaxpaged.openai.responses.store import ResponseStore
from server import chat, completions, messages, responses, status, tokens
from server.auth import KEY_ID, KeyGuard, guard_middleware
from server.errors import Handler, errors_as_json
from server.http_metrics import NOT_COUNTED
from server.state import SERVER, ServerLimits, ServerState

MAX_REQUEST_ID = 256  # characters of X-Request-Id that are echoed


def create_app(
    engine: ServedEngine, api_keys: Sequence[str] = (), limits: ServerLimits | None = None
) -> web.Application:
    """An application over a running engine; `Listener` puts it on a socket."""
    limits = limits or ServerLimits()
    guard = guard_middleware(KeyGuard(api_keys))
    app = web.Application(
        middlewares=[count_requests, errors_as_json, guard],
        client_max_size=limits.max_request_bytes,
    )
    app[SERVER] = ServerState(engine, limits)
    app[responses.STORE] = ResponseStore()
    add_routes(app.router)
    app.on_response_prepare.append(add_headers)
    return app


def add_routes(router: web.UrlDispatcher) -> None:
    """Every route has a name; `auth.OPEN_ROUTES` names those that need no key."""
    router.add_post("/v1/completions", completions.completions, name="completions")
    router.add_post("/v1/chat/completions", chat.chat_completions, name="chat_completions")
    router.add_post("/v1/responses", responses.create, name="responses")
    one = router.add_resource("/v1/responses/{response_id}", name="response")
    one.add_route("GET", responses.retrieve)
    one.add_route("DELETE", responses.delete)
    router.add_post("/v1/responses/{response_id}/cancel", responses.cancel, name="cancel_response")
    router.add_post("/v1/messages", messages.messages, name="messages")
    router.add_post("/v1/messages/count_tokens", messages.count_tokens, name="count_tokens")
    router.add_get("/v1/models", status.models, name="models")
    router.add_get("/v1/models/{model:.+}", status.model, name="model")
    router.add_get("/v1/requests/{id}", status.request_explained, name="request")
    router.add_post("/tokenize", tokens.tokenize, name="tokenize")
    router.add_post("/detokenize", tokens.detokenize, name="detokenize")
    router.add_get("/health", status.health, name="health")
    router.add_get("/health/ready", status.health, name="health_ready")
    router.add_get("/health/live", status.live, name="health_live")
    ping = router.add_resource("/ping", name="ping")
    ping.add_route("GET", status.health)
    ping.add_route("POST", status.health)
    router.add_get("/version", status.version, name="version")
    router.add_get("/load", status.load, name="load")
    router.add_get("/metrics", status.metrics, name="metrics")


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[SERVER].deadlines.arrived(request.protocol)
    start = time.monotonic()
    code = 499  # the client left
    try:
        response = await handler(request)
        code = response.status
        return response
    finally:
        name = request.match_info.route.name
        if name is None or name not in NOT_COUNTED:
            resource = request.match_info.route.resource
            pattern = "none" if resource is None else resource.canonical
            seconds = time.monotonic() - start
            request.app[SERVER].metrics.observe(request.method, pattern, code, seconds)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Echo the client's id, and tell it what is left of its limits."""
    response.headers.update(request.app[SERVER].key_limits.headers(request.get(KEY_ID, "")))
    given = request.headers.get("X-Request-Id")
    if given is not None:
        response.headers["X-Request-Id"] = (
            given[:MAX_REQUEST_ID].encode("ascii", "replace").decode()
        )
