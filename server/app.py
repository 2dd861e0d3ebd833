"""The web application: routes, and what every request passes through."""

import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.served import ServedEngine
from jaxpaged.openai.responses.store import ResponseStore
from server import (
    chat,
    completions,
    embeddings,
    generate,
    invocations,
    messages,
    operator,
    prefixes,
    responses,
    status,
    tokens,
)
from server.access_log import log_access
from server.auth import ApiKey, KeyGuard, guard_middleware, route_name
from server.batching.routes import add_batch_routes, run_batches
from server.batching.store import BatchStore
from server.cors import Origins
from server.engine_state import WATCH, EngineWatch, engine_state
from server.errors import Handler, error_body, errors_as_json
from server.http_metrics import NOT_COUNTED
from server.openapi import openapi
from server.page_files import PageFiles
from server.sse import STREAM
from server.state import SERVER, USAGE, ServerLimits, ServerState, payer_of

MAX_REQUEST_ID = 256  # characters of X-Request-Id that are echoed


def create_app(
    engine: ServedEngine,
    api_keys: Sequence[str | ApiKey] = (),
    limits: ServerLimits | None = None,
    store: BatchStore | None = None,
    pooling: ServedPooling | None = None,
    middlewares: Sequence[Middleware] = (),
) -> web.Application:
    """An application over a running engine; `Listener` puts it on a socket.

    Files and batches are served where there is a store for them; the application closes it.
    `middlewares` are the operator's own, round the check of the key.
    """
    limits, keys = limits or ServerLimits(), KeyGuard(api_keys)
    guard = guard_middleware(keys)
    origins = Origins(limits.allowed_origins)
    app = web.Application(
        middlewares=[count_requests, errors_as_json, origins.middleware(), *middlewares, guard],
        client_max_size=limits.max_request_bytes,
    )
    app[SERVER] = ServerState(engine, limits, pooling=pooling)
    app[responses.STORE] = ResponseStore()
    if store is not None:
        run_batches(app, store, keys)
    app[WATCH] = EngineWatch(engine)
    routers: list[web.UrlDispatcher | _Prefixed] = [app.router]
    if limits.root_path.strip("/"):
        routers.append(_Prefixed(app.router, limits.root_path.rstrip("/")))
    page = PageFiles() if limits.has_ui else None
    for router in routers:
        add_routes(router)
        if limits.tells_tokenizer:
            router.add_get("/tokenizer_info", tokens.tokenizer_info, name="tokenizer_info")
        if page is not None:
            router.add_get("/", page.index, name="page")
            router.add_get("/page/{name}", page.file, name="page_file")

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        """Echo the client's id, tell it what is left of its limits, and let its page read it."""
        if isinstance(response, web.HTTPExpectationFailed):  # aiohttp's, before any middleware
            body = response.body = error_body(response)
            response.content_type = "application/json"
            response.headers["Content-Length"] = str(len(body))
            response.force_close()  # no more of these may lie ready, see `Connections.arrived`
        response.headers.update(app[SERVER].rates.headers(*payer_of(request)))
        response.headers.update(origins.headers(request))
        given = request.headers.get("X-Request-Id")
        if given is None and limits.names_requests:
            given = uuid.uuid4().hex
        if given is not None:
            response.headers["X-Request-Id"] = _printable(given)

    app.on_response_prepare.append(add_headers)
    return app


def create_metrics_app(state: ServerState) -> web.Application:
    """Only `/metrics` and `/health`, without a key: for --metrics-port."""
    app = web.Application(middlewares=[count_requests, errors_as_json])
    app[SERVER] = state
    app.router.add_get("/metrics", status.metrics, name="metrics")
    app.router.add_get("/health", status.health, name="health")
    return app


class _Prefixed:
    """A router that puts a prefix before every path and marks every name."""

    def __init__(self, router: web.UrlDispatcher, prefix: str):
        self._router, self._prefix = router, prefix

    def add_get(self, path: str, handler: Handler, *, name: str) -> object:
        return self._router.add_get(self._prefix + path, handler, name=f"{name}.root")

    def add_post(self, path: str, handler: Handler, *, name: str) -> object:
        return self._router.add_post(self._prefix + path, handler, name=f"{name}.root")

    def add_resource(self, path: str, *, name: str) -> web.Resource:
        return self._router.add_resource(self._prefix + path, name=f"{name}.root")


def add_routes(router: web.UrlDispatcher | _Prefixed) -> None:
    """Every route has a name; `auth.OPEN_ROUTES` names those that need no key."""
    router.add_post("/v1/completions", completions.completions, name="completions")
    router.add_post("/v1/chat/completions", chat.chat_completions, name="chat_completions")
    router.add_post("/v1/responses", responses.create, name="responses")
    one = router.add_resource("/v1/responses/{response_id}", name="response")
    one.add_route("GET", responses.retrieve)
    one.add_route("DELETE", responses.delete)
    items = router.add_resource("/v1/responses/{response_id}/input_items", name="input_items")
    items.add_route("GET", responses.listed_input)
    router.add_post("/v1/responses/{response_id}/cancel", responses.cancel, name="cancel_response")
    router.add_post("/v1/messages", messages.messages, name="messages")
    router.add_post("/v1/messages/count_tokens", messages.count_tokens, name="count_tokens")
    add_batch_routes(router)
    _add_pooling_routes(router)
    many = router.add_resource("/v1/cache/prefixes", name="prefixes")
    many.add_route("POST", prefixes.warm)
    many.add_route("GET", prefixes.listed)
    one = router.add_resource("/v1/cache/prefixes/{prefix_id}", name="prefix")
    one.add_route("DELETE", prefixes.drop)
    router.add_get("/v1/models", status.models, name="models")
    router.add_get("/v1/models/{model:.+}", status.model, name="model")
    router.add_get("/v1/engine/state", engine_state, name="engine_state")
    router.add_get("/v1/requests/{id}", status.request_explained, name="request")
    router.add_post("/tokenize", tokens.tokenize, name="tokenize")
    router.add_post("/detokenize", tokens.detokenize, name="detokenize")
    router.add_get("/health", status.health, name="health")
    router.add_get("/health/ready", status.health, name="health_ready")
    router.add_get("/health/live", status.live, name="health_live")
    _add_sagemaker_routes(router)
    router.add_get("/version", status.version, name="version")
    router.add_get("/load", status.load, name="load")
    router.add_get("/metrics", status.metrics, name="metrics")
    router.add_get("/openapi.json", openapi, name="openapi")
    router.add_post("/inference/v1/generate", generate.generate, name="generate")
    path = "/inference/v1/abort_requests"
    router.add_post(path, operator.abort_requests, name="abort_requests")
    for handler in (operator.sleep, operator.wake_up, operator.reset_prefix_cache,
                    operator.start_profile, operator.stop_profile):  # fmt: skip
        router.add_post(f"/{handler.__name__}", handler, name=handler.__name__)
    router.add_get("/is_sleeping", operator.is_sleeping, name="is_sleeping")


def _add_pooling_routes(router: web.UrlDispatcher | _Prefixed) -> None:
    router.add_post("/v1/embeddings", embeddings.embeddings, name="embeddings")
    for version in ("", "/v1", "/v2"):
        name = version.strip("/")
        router.add_post(f"{version}/rerank", embeddings.rerank, name=f"rerank{name}")
        if version != "/v2":
            router.add_post(f"{version}/score", embeddings.score, name=f"score{name}")


def _add_sagemaker_routes(router: web.UrlDispatcher | _Prefixed) -> None:
    router.add_post("/invocations", invocations.invocations, name="invocations")
    ping = router.add_resource("/ping", name="ping")
    ping.add_route("GET", status.health)
    ping.add_route("POST", status.health)


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    state = request.app[SERVER]
    await state.connections.arrived(request.protocol)
    start, response = time.monotonic(), None
    try:
        response = await handler(request)
        return response
    finally:
        state.connections.answered(request.protocol)
        _note(request, state, response, time.monotonic() - start)


def _note(
    request: web.Request, state: ServerState, response: web.StreamResponse | None, seconds: float
) -> None:
    resource = request.match_info.route.resource
    pattern = "none" if resource is None else resource.canonical
    code = 499 if response is None else response.status  # 499: the client left
    if route_name(request) not in NOT_COUNTED:
        received, sent = request.content.total_bytes, _num_sent(request, response)
        state.metrics.observe(request.method, pattern, code, seconds, received, sent)
    limits = state.limits
    if limits.is_logging_access and request.path not in limits.unlogged_paths:
        usage = request.get(USAGE)
        tokens = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        log_access(request, pattern, code, seconds, tokens)


def _num_sent(request: web.Request, response: web.StreamResponse | None) -> int:
    """Bytes of an answer's body; a file is sent later."""
    stream = request.get(STREAM)
    if stream is not None:
        return stream.num_bytes
    return 0 if response is None else response.content_length or 0


def _printable(request_id: str) -> str:
    return request_id[:MAX_REQUEST_ID].encode("ascii", "replace").decode()
