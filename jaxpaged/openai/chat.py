"""/v1/chat/completions: a body to a job, and how its answers are written."""

from typing import Any

import msgspec

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.openai.chunks import CHAT, Envelope, Usage
from jaxpaged.openai.engine import ServedEngine
from jaxpaged.openai.job import Job
from jaxpaged.openai.logprobs import TokenLabels, chat_logprobs, prompt_logprobs
from jaxpaged.openai.params import chat_params, salt_of
from jaxpaged.openai.prompts import encode_chat
from jaxpaged.openai.schema import ChatRequest, decode_body

_DECODER = msgspec.json.Decoder(ChatRequest)


def read_chat(data: bytes) -> ChatRequest:
    """The body of a request, or a RequestError that names the field."""
    return decode_body(data, _DECODER)


async def chat_job(
    body: ChatRequest, engine: ServedEngine, usage: Usage, *, model: str, key_id: str
) -> Job:
    """Check a body against the engine, and put its messages through the template.

    Raises:
        RequestError: what can never be served.
    """
    params = chat_params(body, engine.default_sampling())
    prompt = await encode_chat(body, engine)
    envelope, form = Envelope.new("chatcmpl", model), ChatForm(body, engine)
    return Job(body, [prompt], params, envelope, form, salt_of(body, key_id), key_id, usage)


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
