"""POST /v1/chat/completions: a conversation, answered."""

from aiohttp import web

from jaxpaged.openai.chat import chat_job, naming_fields, read_chat
from server.answering import respond
from server.auth import KEY_ID
from server.bodies import read_body
from server.state import SERVER, apply_defaults


async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    with server.work(request) as usage:
        body = read_chat(await read_body(request))
        apply_defaults(body, server.limits)
        model = server.check_model(body.model)
        with naming_fields(body, str):
            job = await chat_job(body, server.engine, usage, model=model, key_id=request[KEY_ID])
            return await respond(request, server, job, "chat_completions")
