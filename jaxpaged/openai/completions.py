"""/v1/completions: a body to a job, and how its answers are written."""

import asyncio
from typing import Any

import msgspec

from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.engine.served import ServedEngine
from jaxpaged.openai.chunks import COMPLETION, Envelope, Usage
from jaxpaged.openai.job import Job
from jaxpaged.openai.logprobs import CompletionLogprobs, PromptScores, TokenLabels
from jaxpaged.openai.params import beam_params, check_logprobs, completion_params, salt_of
from jaxpaged.openai.prompts import Prompt, completion_prompts
from jaxpaged.openai.schema import CompletionRequest, decode_body
from jaxpaged.openai.truncation import truncated

_DECODER = msgspec.json.Decoder(CompletionRequest)


def read_completion(data: bytes) -> CompletionRequest:
    """The body of a request, or a RequestError that names the field."""
    return decode_body(data, _DECODER)


async def completion_job(
    body: CompletionRequest, engine: ServedEngine, usage: Usage, *, model: str, key_id: str
) -> Job:
    """Check a body against the engine. What the job uses is added to `usage`.

    Raises:
        RequestError: what can never be served.
    """
    params = completion_params(body, engine.default_sampling())
    check_logprobs(params, engine.model_settings.max_logprobs)
    may_be_long = body.truncate_prompt_tokens is not None
    prompts = completion_prompts(
        body.prompt, params.n, engine, params.max_tokens, may_be_long=may_be_long
    )
    if body.add_special_tokens is False:
        prompts = [await _bare(prompt, engine) for prompt in prompts]
    if may_be_long:
        prompts = [await truncated(body, prompt, params.max_tokens, engine) for prompt in prompts]
    form = CompletionForm(body, params, engine)
    salt = salt_of(body, key_id)
    beams = beam_params(body, params, engine.max_model_len)
    envelope = Envelope.new("cmpl", model, engine.fingerprint)
    return Job(body, prompts, params, envelope, form, salt, key_id, usage, beams)


async def _bare(prompt: Prompt, engine: ServedEngine) -> Any:
    """A text's tokens without those that the tokenizer would put round it; ids stay as they are."""
    if not isinstance(prompt, str):
        return prompt
    ids = await asyncio.to_thread(engine.tokenizer.encode, prompt, False)
    return {"prompt": prompt, "prompt_token_ids": ids}


class CompletionForm:
    """How /v1/completions writes an answer, echo and logprobs included."""

    kind = chunk_kind = COMPLETION

    def __init__(self, body: CompletionRequest, params: SamplingParams, engine: ServedEngine):
        self._body, self._params, self._tokenizer = body, params, engine.tokenizer
        as_ids = bool(body.return_tokens_as_token_ids)
        self._labels = TokenLabels(engine.tokenizer, as_ids=as_ids)
        self._scores = PromptScores(self._labels)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        adds_more = body.return_token_ids or body.echo or body.prompt_logprobs is not None
        self.is_plain = body.logprobs is None and not adds_more

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {}

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        return self.chunk(index, output, part)

    def chunk(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        is_first = index not in self._echoed
        self._echoed.add(index)
        echoes = bool(self._body.echo) and is_first
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text(output) + part.text if echoes else part.text,
            "logprobs": self._lists(index, output, part, echoes),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = self._scores.of(output)
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
            choice["prompt_token_ids"] = list(output.prompt_token_ids) if is_first else None
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, self._params.skip_special_tokens)

    def _lists(
        self, index: int, output: RequestOutput, part: CompletionOutput, echoes: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        lists = self._logprobs.get(index)
        if lists is None:
            skip = self._params.skip_special_tokens
            lists = CompletionLogprobs(self._tokenizer, self._labels, skip_special_tokens=skip)
            self._logprobs[index] = lists
        token_ids, places = list(part.token_ids), list(part.logprobs or ())
        if echoes:
            token_ids = [*output.prompt_token_ids, *token_ids]
            places = [*(output.prompt_logprobs or ()), *places]
        return lists.lists(token_ids, places)
