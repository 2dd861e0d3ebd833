"""/v1/chat/completions: a body to a job, and how its answers are written."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from jaxpaged.config.settings import ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.structured import ReasoningMarks
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import RequestError, UnsupportedParameter
from jaxpaged.openai.chunks import CHAT, Envelope, Usage
from jaxpaged.openai.job import Job
from jaxpaged.openai.logprobs import PromptScores, TokenLabels, chat_logprobs
from jaxpaged.openai.params import beam_params, chat_params, check_logprobs, salt_of
from jaxpaged.openai.parsed import ParsedAnswer, ToolReading
from jaxpaged.openai.prompts import encode_chat, last_turn
from jaxpaged.openai.schema import ChatRequest, decode_body
from jaxpaged.openai.tools import ToolUse, tool_use
from jaxpaged.openai.truncation import truncated
from jaxpaged.text.reasoning import (
    CLOSE,
    OPEN,
    ReasoningParser,
    begins_in_reasoning,
    closes_reasoning,
)

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
    check_logprobs(params, engine.model_settings.max_logprobs, "top_logprobs")
    use = tool_use(body, engine.model_settings)
    params = use.sampling(params)
    prompt = await encode_chat(body, engine, use.shown)
    if body.truncate_prompt_tokens is not None:
        prompt = {"prompt": prompt["prompt"]} | await truncated(
            body, prompt, params.max_tokens, engine
        )
    params = _with_reasoning(body, params, engine.model_settings, prompt["prompt"])
    parsing = _parsing(body, use, params, engine.model_settings, prompt["prompt"])
    form = ChatForm(body, engine, parsing)
    envelope = Envelope.new("chatcmpl", model, engine.fingerprint)
    beams = beam_params(body, params, engine.max_model_len - len(prompt["prompt_token_ids"]))
    salt = salt_of(body, key_id)
    return Job(body, [prompt], params, envelope, form, salt, key_id, usage, beams)


def _with_reasoning(
    body: ChatRequest, params: SamplingParams, settings: ModelSettings, prompt: str
) -> SamplingParams:
    """`params` with room for reasoning before what a grammar holds, or with a limit of it, unless
    the prompt closes it.
    """
    parser, limit = settings.reasoning_parser, _thinking_limit(body)
    if limit is not None and parser is None:
        raise UnsupportedParameter(
            "thinking_token_budget needs a server started with --reasoning-parser",
            param="thinking_token_budget",
        )
    is_free = params.structured_outputs is None and limit is None
    if is_free or parser is None or closes_reasoning(prompt):
        return params
    is_open = begins_in_reasoning(parser, prompt)
    return replace(params, reasoning=ReasoningMarks(OPEN, CLOSE, is_open, limit))


def _thinking_limit(body: ChatRequest) -> int | None:
    """Tokens of reasoning that a request wants at most; -1 is no limit, as in vLLM."""
    limit = body.thinking_token_budget
    if limit is not None and not -1 <= limit < 2**31:
        raise RequestError(
            f"thinking_token_budget is {limit}, allowed are 0 or more tokens, or -1 for no limit",
            param="thinking_token_budget",
        )
    return None if limit == -1 else limit


def _parsing(
    body: ChatRequest,
    use: ToolUse,
    params: SamplingParams,
    settings: ModelSettings,
    prompt: str,
) -> Callable[[], ParsedAnswer] | None:
    """Makes what reads one answer; None where its text is content as it stands."""
    parser = settings.reasoning_parser
    if parser is None or (params.structured_outputs is not None and params.reasoning is None):
        if use.mode == "none":
            return None
        return lambda: ParsedAnswer(None, use.parser())
    is_open = begins_in_reasoning(parser, prompt)
    return lambda: ParsedAnswer(
        ReasoningParser(is_open=is_open),
        use.parser(),
        shows_reasoning=body.include_reasoning is not False,
    )


def client_field(body: ChatRequest, param: str | None) -> str | None:
    """The request's own field for one that was made of it."""
    if param == "structured_outputs" and body.structured_outputs is None:
        return "tools" if body.response_format is None else "response_format"
    if param == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "messages" if param == "prompt" else param


@contextmanager
def naming_fields(body: ChatRequest, own_name: Callable[[str], str]) -> Generator[None]:
    """A refusal of a chat request that was made of another one names that one's field.

    `own_name` tells the other request's name of the chat request's field.
    """
    try:
        yield
    except RequestError as error:
        param = client_field(body, error.param)
        error.name_field(own_name(param) if param else None)
        error.name_limit(own_name(client_field(body, "max_tokens") or ""))
        raise


class ChatForm:
    """How /v1/chat/completions writes an answer."""

    kind, chunk_kind = CHAT, f"{CHAT}.chunk"

    def __init__(
        self,
        body: ChatRequest,
        engine: ServedEngine,
        parsing: Callable[[], ParsedAnswer] | None = None,
    ):
        self._body, self._parsing = body, parsing
        self._answers: dict[int, ParsedAnswer] = {}
        as_ids = bool(body.return_tokens_as_token_ids)
        self._labels = TokenLabels(engine.tokenizer, as_ids=as_ids)
        self._scores = PromptScores(self._labels)
        self._echoed = last_turn(body.messages) if body.echo else ""
        of_prompt = body.return_prompt_text or body.prompt_logprobs is not None
        self.is_plain = not (body.logprobs or body.return_token_ids or of_prompt or parsing)

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": self._echoed}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._scores.of(output)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._body.return_prompt_text:
            told["prompt_text"] = output.prompt
        return told

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        answer = self._answer(index)
        if answer is None:
            message = {"role": "assistant", "content": part.text, "refusal": None}
        else:
            message = answer.message(part.text)
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        choice: dict[str, Any] = {"index": index, "message": message}
        return choice | self._rest(part, answer)

    def chunk(
        self, index: int, output: RequestOutput, part: CompletionOutput
    ) -> dict[str, Any] | None:
        answer, ends = self._answer(index), part.finish_reason is not None
        if answer is None:
            delta: dict[str, Any] = {"content": part.text}
        else:
            delta = answer.delta(part.text, ends=ends)
            if not (delta or ends or self._body.logprobs or self._body.return_token_ids):
                return None
        return {"index": index, "delta": delta} | self._rest(part, answer)

    def parsed(self) -> ParsedAnswer:
        """What reads the one answer of other endpoints; one that is content as it stands too."""
        return self._answer(0) or ParsedAnswer(None, None)

    @property
    def tool_readings(self) -> list[ToolReading]:
        """What tool parsers found in the answers that have ended."""
        found = [answer.reading for answer in self._answers.values()]
        return [reading for reading in found if reading is not None]

    def _answer(self, index: int) -> ParsedAnswer | None:
        if self._parsing is not None and index not in self._answers:
            self._answers[index] = self._parsing()
        return self._answers.get(index)

    def _rest(self, part: CompletionOutput, answer: ParsedAnswer | None) -> dict[str, Any]:
        reason = part.finish_reason
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(part),
            "finish_reason": reason if answer is None else answer.finish_reason(reason),
            "stop_reason": part.stop_reason,
        }
        if self._body.return_token_ids:
            rest["token_ids"] = part.token_ids
        return rest

    def _logprobs(self, part: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        told = self._body.logprob_token_ids or self._body.top_logprobs or 0
        return chat_logprobs(self._labels, part.token_ids, part.logprobs or (), told)
