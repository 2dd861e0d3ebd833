"""Bodies of requests: bounded in size, in time, and all together."""

import asyncio

from aiohttp import web

from jaxpaged.errors import CapacityError
from server.errors import HttpError
from server.state import SERVER, shutting_down

SMALL_BODY = 65_536  # bytes that always find room


async def read_body(request: web.Request) -> bytes:
    """The body, once it is whole and no other has been read in this pass of the event loop.

    Raises:
        HttpError: too large 413, compressed 415, too slow 408.
        Draining: the server shuts down, and the body was not there in time.
    """
    state = request.app[SERVER]
    limits = state.limits
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, "Content-Encoding is not served: send the body as it is")
    if (request.content_length or 0) > limits.max_request_bytes:
        raise HttpError(413, f"the body is larger than {limits.max_request_bytes} bytes")
    try:
        async with asyncio.timeout(limits.body_timeout_s) as deadline:
            state.arriving.add(deadline)
            try:
                body = await _arriving(request)
            finally:
                state.arriving.discard(deadline)
    except TimeoutError:
        if state.is_draining:
            raise shutting_down() from None
        raise HttpError(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s"
        ) from None
    await state.turns.next()
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
