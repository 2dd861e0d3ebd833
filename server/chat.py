"""POST /v1/chat/completions: a conversation, answered."""

from typing import Any

import msgspec
from aiohttp import web

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.errors import RequestError
from server.answering import respond
from server.auth import KEY_ID
from server.chunks import CHAT, Envelope
from server.engine import ServedEngine
from server.job import Job
from server.logprobs import TokenLabels, chat_logprobs, prompt_logprobs
from server.params import chat_params, salt_of
from server.prompts import encode_chat
from server.schema import ChatRequest, decode_body
from server.state import SERVER, read_body

_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    with server.work():
        body = decode_body(await read_body(request), _DECODER)
        model = server.check_model(body.model)
        params = chat_params(body, server.engine.default_sampling())
        prompt = await encode_chat(body, server.engine)
        job = Job(
            body,
            [prompt],
            params,
            Envelope.new("chatcmpl", model),
            ChatForm(body, server.engine),
            salt_of(body, request[KEY_ID]),
        )
        try:
            return await respond(request, server, job)
        except RequestError as error:
            if error.param == "prompt":  # the engine's word for what was made of the messages
                error.param = "messages"
            raise


class ChatForm:
    """How /v1/chat/completions writes an answer."""

    kind, chunk_kind = CHAT, f"{CHAT}.chunk"

    def __init__(self, body: ChatRequest, engine: ServedEngine):
        self._body = body
        as_ids = bool(body.return_tokens_as_token_ids)
        self._labels = TokenLabels(engine.tokenizer, as_ids=as_ids)
        self.is_plain = not (body.logprobs or body.return_token_ids)

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
        }
        choice |= self._rest(part)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._labels, output.prompt_logprobs or ())
        return choice

    def chunk(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        return {"index": index, "delta": {"content": part.text}} | self._rest(part)

    def _rest(self, part: CompletionOutput) -> dict[str, Any]:
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.return_token_ids:
            rest["token_ids"] = part.token_ids
        return rest

    def _logprobs(self, part: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        num_top = self._body.top_logprobs or 0
        return chat_logprobs(self._labels, part.token_ids, part.logprobs or (), num_top)
