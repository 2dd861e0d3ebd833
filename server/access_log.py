"""One line a request: JSON, so that nothing a client writes can break a line or forge one."""

import logging
from typing import Any

import msgspec
from aiohttp import web

from server.auth import KEY

log = logging.getLogger("server.access")

MAX_PATH = 200  # characters


def log_access(
    request: web.Request, route: str, status: int, seconds: float, tokens: tuple[int, int] | None
) -> None:
    """`tokens` are those of prompt and answer, where the request went to the engine."""
    key = request.get(KEY)
    fields: dict[str, Any] = {
        "method": request.method[:20],
        "path": request.path[:MAX_PATH],
        "route": route,
        "status": status,
        "seconds": round(seconds, 4),
        "remote": request.remote,
        "key": None if key is None else key.name,
        "request_id": request.headers.get("X-Request-Id", "")[:MAX_PATH] or None,
    }
    if tokens is not None:
        fields["prompt_tokens"], fields["completion_tokens"] = tokens
    log.info("%s", json_line(fields))


def json_line(fields: dict[str, Any]) -> str:
    """One line of JSON, whatever a client wrote."""
    try:
        return msgspec.json.encode(fields).decode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a path may hold
        clean = {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return msgspec.json.encode(clean).decode()
