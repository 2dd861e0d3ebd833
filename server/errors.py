"""Exceptions become HTTP statuses here and nowhere else, in the shape that OpenAI clients know."""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from jaxpaged.errors import (
    CapacityError,
    EngineStopped,
    GenerationFailed,
    InvariantError,
    JaxPagedError,
    OutOfTime,
    RateLimited,
    RequestError,
)

log = logging.getLogger(__name__)

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MESSAGES = "/v1/messages"
MAX_MESSAGE = 1000  # characters; a message may quote what the client sent


class HttpError(Exception):
    """A refusal that has a status of its own."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


_STATUS: dict[type[JaxPagedError], int] = {
    RequestError: 400,
    RateLimited: 429,
    OutOfTime: 408,
    CapacityError: 503,
    EngineStopped: 500,
    GenerationFailed: 500,
    InvariantError: 500,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    507: "server_error",
}
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error"}


def status_of(error: BaseException) -> int:
    """The HTTP status that tells of `error`; 500 for what nobody foresaw."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, web.HTTPException):
        return error.status
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def error_body(error: BaseException, path: str = "") -> bytes:
    """The JSON of an error."""
    fields = error_fields(error)
    if MESSAGES not in path:
        return msgspec.json.encode({"error": fields})
    fields["type"] = _ANTHROPIC_TYPES.get(status_of(error), fields["type"])
    return msgspec.json.encode({"type": "error", "error": fields})


def error_fields(error: BaseException) -> dict[str, Any]:
    """What is told. What nobody foresaw is not described: its text may hold anything."""
    status = status_of(error)
    return {
        "message": _message(error),
        "type": _TYPES.get(status, "invalid_request_error"),
        "param": getattr(error, "param", None),
        "code": error.code if isinstance(error, HttpError) else None,
    }


def _message(error: BaseException) -> str:
    if isinstance(error, EngineStopped):
        return str(error).partition(":")[0]  # the cause is the operator's to read
    if isinstance(error, HttpError | JaxPagedError):
        return str(error)[:MAX_MESSAGE].encode("utf-8", "replace").decode()
    if isinstance(error, web.HTTPException):
        return _HTTP_MESSAGES.get(error.status, error.reason)
    return "internal error; the server's log has the cause"


_HTTP_MESSAGES = {
    404: "there is no such endpoint",
    405: "this endpoint does not take this method",
    413: "the body is larger than --max-request-bytes",
    417: "of Expect only 100-continue is served",
}


def error_response(error: BaseException, path: str) -> web.Response:
    headers: dict[str, str] = {}
    if isinstance(error, CapacityError | RateLimited):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=status_of(error),
        body=error_body(error, path),
        content_type="application/json",
        headers=headers,
    )


def log_refusal(request: web.BaseRequest, error: BaseException) -> None:
    """One line a refusal; what the client wrote is escaped."""
    status = status_of(error)
    if status == 500 and not isinstance(error, JaxPagedError):
        log.error("500 %s %r", request.method, request.path, exc_info=error)
    else:
        log.info("%d %s %r: %.200r", status, request.method, request.path, _message(error))


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The only place where an exception becomes an HTTP status."""
    try:
        return await handler(request)
    except Exception as error:  # a request's failure is its own: it never ends the server
        log_refusal(request, error)
        return error_response(error, request.path)
