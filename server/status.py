"""What is served and how it fares: models, health, version, load, metrics."""

import time
from typing import Any

from aiohttp import web

from jaxpaged import __version__
from jaxpaged.engine.replica_metrics import merge_texts
from jaxpaged.engine.served import ReplicaStatus
from jaxpaged.openai.chunks import encode
from server.auth import KEY_ID
from server.errors import HttpError
from server.state import SERVER, ServerState

STARTED = int(time.time())


def _json(fields: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(fields), status=status, content_type="application/json")


def _model(server: ServerState, name: str) -> dict[str, object]:
    engine = server.engine_of(name)
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "jaxpaged",
        "root": engine.named_model or engine.config.model.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }


async def models(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    listed = [_model(server, name) for name in server.model_names]
    return _json({"object": "list", "data": listed})


async def model(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    return _json(_model(server, request.match_info["model"]))


async def request_explained(request: web.Request) -> web.Response:
    """Why a request waited and what it got: an open one's, or one that said `"explain": true`."""
    engine, answer_id = request.app[SERVER].engine, request.match_info["id"]
    found: list[dict[str, Any]] = []
    while explanation := await engine.explanation(f"{answer_id}-{len(found)}"):
        found.append(explanation)
    if not found or found[0]["key_name"] != request[KEY_ID]:
        raise HttpError(
            404,
            f"no request {answer_id[:200]!r} is open under this key, nor did one lately ask to be "
            'explained: send it with "explain": true',
        )
    return _json({"id": answer_id, "object": "request", "prompts": found})


async def health(request: web.Request) -> web.Response:
    """200 with nothing in it; 503 with one word once requests cannot be served.

    While some replicas serve and others do not: 200, with how each fares.
    """
    server = request.app[SERVER]
    limit_s, trouble = server.limits.stall_timeout_s, None
    if not server.is_running:
        trouble = "stopped"
    elif server.is_draining:
        trouble = "draining"
    elif server.seconds_without_progress > limit_s:
        trouble = "stalled"
    if trouble is not None:
        return _json({"status": trouble}, 503)
    replicas = [_replica(status, limit_s) for status in server.engine.replicas()]
    if any(replica["state"] != "ready" for replica in replicas):
        return _json({"status": "degraded", "replicas": replicas})
    return web.Response()


def _replica(status: ReplicaStatus, stall_timeout_s: float) -> dict[str, object]:
    is_stalled = status.seconds_without_progress > stall_timeout_s
    return {
        "engine": status.engine,
        "state": "stalled" if is_stalled else status.state,
        "restarts": status.num_restarts,
    }


async def live(request: web.Request) -> web.Response:
    """200 while the process should be left alone, also when it drains."""
    is_running = request.app[SERVER].is_running
    return web.Response(status=200 if is_running else 503)


async def version(request: web.Request) -> web.Response:
    return _json({"version": __version__})


async def load(request: web.Request) -> web.Response:
    return _json({"server_load": request.app[SERVER].num_working})


async def metrics(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    texts = [await engine.metrics_text() for engine in server.engines]
    text = merge_texts(texts) + server.metrics.text()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})
