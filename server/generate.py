"""POST /inference/v1/generate: token ids in, token ids out."""

from aiohttp import web

from jaxpaged.errors import RequestError
from jaxpaged.openai.generate import generate_job, read_generate
from server.answering import respond
from server.auth import KEY_ID
from server.bodies import read_body
from server.state import SERVER


async def generate(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    with server.work(request) as usage:
        body = read_generate(await read_body(request))
        model = server.check_model(body.model)
        try:
            job = generate_job(body, server.engine, usage, model=model, key_id=request[KEY_ID])
            return await respond(request, server, job, "generate")
        except RequestError as error:
            error.name_field("token_ids" if error.param == "prompt" else error.param)
            raise
