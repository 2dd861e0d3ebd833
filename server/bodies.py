"""Bodies of requests: bounded in size, in time, and all together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from jaxpaged.errors import CapacityError
from server.errors import HttpError
from server.state import LATE_BODY_S, SERVER, ServerState, shutting_down

BODY = web.RequestKey("body", bytes)
SMALL_BODY = 65_536  # bytes that always find room


@asynccontextmanager
async def arriving(state: ServerState) -> AsyncGenerator[None]:
    """The time in which a body, or a part of one, must arrive; little once the server drains.

    Raises:
        TimeoutError: it did not.
        Draining: it did not, and the server shuts down.
    """
    seconds = state.limits.body_timeout_s
    if state.is_draining:
        seconds = min(seconds, LATE_BODY_S)
    try:
        async with asyncio.timeout(seconds) as deadline:
            state.arriving.add(deadline)
            try:
                yield
            finally:
                state.arriving.discard(deadline)
    except TimeoutError:
        if state.is_draining:
            raise shutting_down() from None
        raise


async def read_body(request: web.Request) -> bytes:
    """The body, once it is whole and no other has been read in this pass of the event loop.

    Raises:
        HttpError: too large 413, compressed 415, too slow 408.
        Draining: the server shuts down, and the body was not there in time.
    """
    if BODY in request:
        return request[BODY]
    state = request.app[SERVER]
    limits = state.limits
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, "Content-Encoding is not served: send the body as it is")
    if (request.content_length or 0) > limits.max_request_bytes:
        raise HttpError(413, f"the body is larger than {limits.max_request_bytes} bytes")
    try:
        async with arriving(state):
            body = await _arriving(request)
    except TimeoutError:
        raise HttpError(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s"
        ) from None
    await state.turns.next()
    return body


async def keep_body(request: web.Request) -> bytes:
    """`read_body`, which gives the same again to whom the request is handed on."""
    body = request[BODY] = await read_body(request)
    return body


async def _arriving(request: web.Request) -> bytes:
    state, data = request.app[SERVER], bytearray()
    limits = state.limits
    try:
        async for part in request.content.iter_any():
            data += part
            state.num_waiting_bytes += len(part)
            if len(data) > limits.max_request_bytes:
                raise HttpError(413, f"the body is larger than {limits.max_request_bytes} bytes")
            is_large = len(data) > SMALL_BODY
            if is_large and state.num_waiting_bytes > limits.max_waiting_bytes:
                raise CapacityError("too many large bodies arrive at once: try again")
    finally:
        state.num_waiting_bytes -= len(data)
    return bytes(data)
