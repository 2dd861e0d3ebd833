"""/inference/v1/generate: token ids to token ids, for callers that tokenise themselves."""

from dataclasses import replace
from typing import Any

import msgspec

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import Envelope, Usage
from jaxpaged.openai.completions import read_completion
from jaxpaged.openai.job import Job
from jaxpaged.openai.logprobs import PromptScores, TokenLabels, chat_logprobs
from jaxpaged.openai.params import beam_params, check_logprobs, completion_params, salt_of
from jaxpaged.openai.prompts import completion_prompts
from jaxpaged.openai.schema import CompletionRequest, GenerateRequest, decode_body

_DECODER = msgspec.json.Decoder(GenerateRequest)


def read_generate(data: bytes) -> GenerateRequest:
    """The body of a request, or a RequestError that names the field."""
    return decode_body(data, _DECODER)


def generate_job(
    body: GenerateRequest, engine: ServedEngine, usage: Usage, *, model: str, key_id: str
) -> Job:
    """Check a body against the engine.

    Raises:
        RequestError: what can never be served.
    """
    if not body.token_ids:
        raise RequestError("token_ids is empty: it needs at least one token", param="token_ids")
    whole = _as_completion(body)
    params = completion_params(whole, engine.default_sampling())
    check_logprobs(params, engine.model_settings.max_logprobs)
    params = replace(params, detokenize=bool(params.stop))
    prompts = completion_prompts(body.token_ids, params.n, engine, params.max_tokens)
    envelope = Envelope.new("gen", model, engine.fingerprint)
    form = TokensForm(whole, engine, body.request_id)
    beams, salt = beam_params(whole, params, engine.max_model_len), salt_of(whole, key_id)
    return Job(whole, prompts, params, envelope, form, salt, key_id, usage, beams)


def _as_completion(body: GenerateRequest) -> CompletionRequest:
    """Its sampling parameters have the names and rules that completions have."""
    fields = {
        name: getattr(body, name)
        for name in ("stream", "stream_options", "cache_salt", "priority", "request_id")
    }
    return read_completion(msgspec.json.encode((body.sampling_params or {}) | fields))


class TokensForm:
    """How /inference/v1/generate writes an answer."""

    kind, chunk_kind, is_plain = "generate", "generate.chunk", False

    def __init__(self, body: CompletionRequest, engine: ServedEngine, request_id: str | None):
        self._body, self._request_id = body, request_id
        self._labels = TokenLabels(engine.tokenizer, as_ids=True)
        self._scores = PromptScores(self._labels)
        self._begun: set[int] = set()

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {}

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        return self.chunk(index, output, part)

    def chunk(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": part.token_ids,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.logprobs is not None:
            places = part.logprobs or ()
            told = self._body.logprob_token_ids or self._body.logprobs
            choice["logprobs"] = chat_logprobs(self._labels, part.token_ids, places, told)
        if self._body.prompt_logprobs is not None and index not in self._begun:
            choice["prompt_logprobs"] = self._scores.of(output)
        if self._request_id is not None:
            choice["request_id"] = self._request_id
        self._begun.add(index)
        return choice
