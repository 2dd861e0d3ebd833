"""POST /v1/completions: text or token ids, continued."""

from aiohttp import web

from jaxpaged.openai.completions import completion_job, read_completion
from server.answering import respond
from server.auth import KEY_ID
from server.bodies import read_body
from server.state import SERVER, apply_defaults


async def completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    with server.work(request) as usage:
        body = read_completion(await read_body(request))
        apply_defaults(body, server.limits)
        model = server.check_model(body.model)
        key_id = request[KEY_ID]
        job = await completion_job(body, server.engine, usage, model=model, key_id=key_id)
        return await respond(request, server, job, "completions")
