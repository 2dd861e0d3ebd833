"""POST /inference/v1/generate: token ids in, token ids out."""

from aiohttp import web

from jaxpaged.openai.generate import generate_job, read_generate
from server.answering import respond
from server.auth import KEY_ID
from server.state import SERVER, read_body


async def generate(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    with server.work(request) as usage:
        body = read_generate(await read_body(request))
        model = server.check_model(body.model)
        job = generate_job(body, server.engine, usage, model=model, key_id=request[KEY_ID])
        return await respond(request, server, job, "generate")
