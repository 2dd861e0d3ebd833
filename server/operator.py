"""What an operator asks of the running engine: sleep, profiles, an empty prefix cache, aborts."""

from typing import Any

import msgspec
from aiohttp import web

from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.schema import AbortRequest, decode_body
from server.bodies import read_body
from server.state import SERVER

_WAKE_TAGS = {"weights", "kv_cache"}  # vLLM's names of what an engine wakes up; here it is all
_ABORT = msgspec.json.Decoder(AbortRequest)


async def _control(request: web.Request, method: str, *arguments: Any) -> web.Response:
    await request.app[SERVER].engine.control(method, *arguments)
    return web.Response()


async def sleep(request: web.Request) -> web.Response:
    level = request.query.get("level", "1")
    if level not in ("1", "2"):
        raise RequestError(f"level is {level[:20]!r}, allowed are 1 and 2", param="level")
    return await _control(request, "sleep", int(level))


async def wake_up(request: web.Request) -> web.Response:
    for tag in request.query.getall("tags", []):
        if tag not in _WAKE_TAGS:
            raise RequestError(
                f"tags is {tag[:20]!r}, allowed are weights and kv_cache; with either all wakes up",
                param="tags",
            )
    return await _control(request, "wake_up")


async def is_sleeping(request: web.Request) -> web.Response:
    sleeps = await request.app[SERVER].engine.control("is_sleeping")
    return web.Response(body=encode({"is_sleeping": sleeps}), content_type="application/json")


async def reset_prefix_cache(request: web.Request) -> web.Response:
    return await _control(request, "reset_prefix_cache")


async def start_profile(request: web.Request) -> web.Response:
    folder = request.app[SERVER].limits.profile_dir
    if folder is None:
        raise RequestError("start the server with --profile-dir DIR: traces are written there")
    return await _control(request, "start_profile", folder)


async def stop_profile(request: web.Request) -> web.Response:
    return await _control(request, "stop_profile")


async def abort_requests(request: web.Request) -> web.Response:
    """End requests by the id in their answer or the one that the client gave."""
    server = request.app[SERVER]
    wanted = set(decode_body(await read_body(request), _ABORT).request_ids)
    found: set[str] = set()
    for job in tuple(server.open_jobs):
        number = job.envelope.answer_id.rpartition("-")[2]
        # as /v1/responses and /v1/messages tell it
        told = {job.envelope.answer_id, f"resp_{number}", f"msg_{number}"}
        if wanted & {*told, job.body.request_id}:
            found.add(job.envelope.answer_id)
            for request_id in job.request_ids:
                await server.engine.abort(request_id)
    return web.Response(body=encode({"aborted": sorted(found)}), content_type="application/json")
