"""What the routes of files and batches have in common."""

import msgspec
from aiohttp import web

from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import encode
from server.auth import KEY_ID, is_admin
from server.batching.runner import BatchRunner
from server.batching.store import BatchStore
from server.errors import HttpError
from server.paging import ID

RUNNER = web.AppKey("batches", BatchRunner)
LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 30 * 86_400


class ExpiresAfter(msgspec.Struct):
    """How long a file is kept."""

    anchor: str
    seconds: int

    def checked(self, param: str) -> int:
        """The seconds.

        Raises:
            RequestError: an anchor or a number that is not served.
        """
        if self.anchor != "created_at":
            raise RequestError(
                f"{param}: anchor is {self.anchor[:40]!r}, it must be created_at", param=param
            )
        if not LEAST_EXPIRY_S <= self.seconds <= MOST_EXPIRY_S:
            allowed = f"{LEAST_EXPIRY_S} to {MOST_EXPIRY_S}"
            raise RequestError(
                f"{param}: seconds is {self.seconds}, allowed are {allowed}", param=param
            )
        return self.seconds


class BatchRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


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
    if not ID.fullmatch(given):
        raise unknown(what, given)
    return given


def unknown(what: str, given: str) -> HttpError:
    return HttpError(404, f"there is no {what} {given[:100]!r}", code=f"{what}_not_found")


def json(fields: object) -> web.Response:
    return web.Response(body=encode(fields), content_type="application/json")
