"""What the routes of files and batches have in common."""

import re
from typing import Any

import msgspec
from aiohttp import web

from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import encode
from server.auth import KEY_ID, is_admin
from server.batching.runner import BatchRunner
from server.batching.store import BatchStore
from server.errors import HttpError

RUNNER = web.AppKey("batches", BatchRunner)
MAX_PAGE, PAGE = 100, 20

_ID = re.compile(r"[a-z]{1,8}[-_][0-9a-f]{32}")


class BatchRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None  # known and not served


def runner_of(request: web.Request) -> BatchRunner:
    runner = request.app.get(RUNNER)
    if runner is None:
        raise HttpError(
            404, "files and batches are not served here: start the server with --batch-dir DIR"
        )
    return runner


def store_of(request: web.Request) -> BatchStore:
    return runner_of(request).store


def owner_of(request: web.Request) -> str | None:
    """Whose files and batches are seen: the key's, or for None those of all."""
    return None if is_admin(request) else request[KEY_ID]


def id_of(request: web.Request, what: str) -> str:
    """The id in the path, if it can be one."""
    given = request.match_info[f"{what}_id"]
    if not _ID.fullmatch(given):
        raise unknown(what, given)
    return given


def unknown(what: str, given: str) -> HttpError:
    return HttpError(404, f"there is no {what} {given[:100]!r}", code=f"{what}_not_found")


def page_asked(request: web.Request) -> tuple[str | None, int]:
    """`after` and `limit` of a list."""
    after, limit = request.query.get("after"), request.query.get("limit", str(PAGE))
    if after is not None and not _ID.fullmatch(after):
        raise RequestError(f"after: there is no {after[:100]!r}", param="after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and int(limit)):
        raise RequestError(f"limit must be 1 to {MAX_PAGE}", param="limit")
    return after, min(int(limit), MAX_PAGE)


def json(fields: object) -> web.Response:
    return web.Response(body=encode(fields), content_type="application/json")
