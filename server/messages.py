"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same engine."""

from contextlib import aclosing

from aiohttp import web

from jaxpaged.anthropic.answers import MessageAnswer, failure
from jaxpaged.anthropic.convert import chat_request, naming_its_fields
from jaxpaged.anthropic.schema import read_count, read_messages
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.openai.answers import check_output, outputs_of
from jaxpaged.openai.chat import ChatForm, chat_job
from jaxpaged.openai.chunks import Usage, encode
from jaxpaged.openai.job import Job
from jaxpaged.openai.prompts import encode_chat
from jaxpaged.openai.tools import tool_use
from server.answering import stream_outputs
from server.auth import KEY_ID
from server.bodies import read_body
from server.errors import MESSAGES, error_body
from server.state import SERVER, ServerState


async def messages(request: web.Request) -> web.StreamResponse:
    server, key_id = request.app[SERVER], request[KEY_ID]
    with server.work(request) as usage:
        body = read_messages(await read_body(request))
        model = server.check_model(body.model)
        chat = chat_request(body)
        if body.thinking is not None and server.engine.model_settings.reasoning_parser:
            chat.thinking_token_budget = body.thinking.budget_tokens
        with naming_its_fields(chat):
            job = await chat_job(chat, server.engine, usage, model=model, key_id=key_id)
            return await _respond(request, server, job)


async def count_tokens(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body = read_count(await read_body(request))
    server.check_model(body.model)
    chat = chat_request(body)
    with naming_its_fields(chat):
        use = tool_use(chat, server.engine.model_settings)
        prompt = await encode_chat(chat, server.engine, use.shown)
    answer = {"input_tokens": len(prompt["prompt_token_ids"])}
    return web.Response(body=encode(answer), content_type="application/json")


async def _respond(request: web.Request, server: ServerState, job: Job) -> web.StreamResponse:
    writer = _Writer(job)
    with server.open(job, "messages", streams=bool(job.body.stream)):
        async with aclosing(outputs_of(job, server.engine)) as outputs:
            if job.body.stream:
                return await stream_outputs(request, server, outputs, writer)
            _, output = await anext(outputs)
            check_output(output)
            answer = writer.whole(output)
            return web.Response(body=encode(answer), content_type="application/json")


class _Writer:
    """One message, whole or as events."""

    tail = b""

    def __init__(self, job: Job):
        assert isinstance(job.form, ChatForm)
        answer_id = job.envelope.answer_id.replace("chatcmpl-", "msg_")
        self._message = MessageAnswer(answer_id, job.envelope.model, job.form.parsed())
        self._usage = job.usage

    def whole(self, output: RequestOutput) -> dict[str, object]:
        _count(self._usage, output)
        return self._message.whole(output)

    def events(self, number: int, output: RequestOutput) -> bytes:
        _count(self._usage, output)
        return self._message.events(output)

    def last(self) -> bytes:
        return b""

    def failure(self, error: BaseException) -> bytes:
        return failure(error_body(error, MESSAGES))


def _count(usage: Usage, output: RequestOutput) -> None:
    if not usage.prompt_tokens:
        usage.add_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
    usage.completion_tokens += sum(len(part.token_ids) for part in output.outputs)
