"""From a request's fields to SamplingParams, and what must not be there."""

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxpaged.core.beams import BeamSearchParams
from jaxpaged.core.params import MAX_BIASES, MAX_LOGPROBS, OutputKind, SamplingParams
from jaxpaged.core.repetition import RepetitionDetectionParams
from jaxpaged.errors import RequestError, UnsupportedParameter
from jaxpaged.openai.formats import structured_outputs
from jaxpaged.openai.schema import ChatRequest, CompletionRequest, PrefixRequest, SamplingFields

_NOT_WITH_BEAMS = (
    "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
    "logits_processors", "structured_outputs", "response_format", "presence_penalty",
    "frequency_penalty", "prompt_logprobs", "logprob_token_ids", "explain", "tools",
    "thinking_token_budget", "repetition_detection",
)  # fmt: skip
COMPLETION_MAX_TOKENS = 16
MAX_SALT = 1024  # characters
MAX_TIMEOUT_S = 86_400.0

_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "allowed_token_ids", "bad_words", "logits_processors", "prompt_logprobs",
    "stream_interval", "explain",
)  # fmt: skip
_NOT_SERVED = (
    "prompt_embeds", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "kv_transfer_params",
)  # fmt: skip
_NOT_SERVED_IN_CHAT = ("functions", "function_call", "audio")


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling of a completion: what the client says, else the model's defaults, else vLLM's."""
    _check_served(body)
    if body.suffix:
        raise UnsupportedParameter("suffix is not served: put it into the prompt", param="suffix")
    values = _common(body, defaults)
    values["max_tokens"] = _first(
        body.max_tokens, defaults.get("max_tokens"), COMPLETION_MAX_TOKENS
    )
    values |= _logprobs(body, body.logprobs)
    if body.echo and body.logprobs is not None and "prompt_logprobs" not in values:
        values["prompt_logprobs"] = body.logprobs
    return SamplingParams(**values)


def chat_params(body: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling of a chat answer; without a limit it may fill the context."""
    _check_served(body)
    for name in _NOT_SERVED_IN_CHAT:
        if getattr(body, name) is not None:
            raise UnsupportedParameter(f"{name} is not served: leave it out", param=name)
    if any(kind != "text" for kind in body.modalities or ()):
        raise UnsupportedParameter("modalities: only text is served", param="modalities")
    values = _common(body, defaults)
    values["max_tokens"] = _first(
        body.max_completion_tokens, body.max_tokens, defaults.get("max_tokens")
    )
    values |= _logprobs(body, _chat_logprobs(body))
    return SamplingParams(**values)


def check_logprobs(params: SamplingParams, most: int, field: str = "logprobs") -> None:
    """Refuse more logprobs of a place than --max-logprobs allows; `field` asks for an answer's."""
    wanted = {"prompt_logprobs": params.prompt_logprobs, field: params.logprobs}
    for name, num in wanted.items():
        if num is not None and num > most:
            raise RequestError(
                f"{name} is {num}, this server allows at most {most} (--max-logprobs)", param=name
            )


def _logprobs(body: SamplingFields, num: int | None) -> dict[str, Any]:
    """Of the likeliest tokens at each place, or of those that the request names."""
    if body.logprob_token_ids is None:
        return {"logprobs": num}
    if num is None:
        raise RequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
    return {"logprob_token_ids": body.logprob_token_ids}


def salt_of(body: SamplingFields | PrefixRequest, key_id: str) -> str:
    """What separates prefix caches: the API key, and the client's own salt within it."""
    salt = body.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_SALT:
        raise RequestError(
            f"cache_salt has {len(salt)} characters, allowed are 1 to {MAX_SALT}",
            param="cache_salt",
        )
    return f"{key_id}:{salt or ''}" if key_id or salt else ""


def _common(body: SamplingFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in defaults.items() if name != "max_tokens"}
    given = ((name, getattr(body, name)) for name in _PLAIN)
    values |= {name: value for name, value in given if value is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = _biases(body.logit_bias)
    if body.repetition_detection is not None:
        looks_for = msgspec.structs.asdict(body.repetition_detection)
        values["repetition_detection"] = RepetitionDetectionParams(
            **{name: value for name, value in looks_for.items() if value is not None}
        )
    values["structured_outputs"] = structured_outputs(body)
    values["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    return values


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIASES:  # before anything is done for each
        raise RequestError(
            f"logit_bias has {len(given)} entries, allowed are {MAX_BIASES}", param="logit_bias"
        )
    biases: dict[int, float] = {}
    for key, value in given.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(key) < 20):
            raise RequestError(
                f"logit_bias names {key[:40]!r}, which is no token id", param="logit_bias"
            )
        biases[int(key)] = value
    return biases


def _chat_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {num_top}, allowed are 0 to {MAX_LOGPROBS}", param="top_logprobs"
        )
    return num_top


def _check_served(body: SamplingFields) -> None:
    for name in _NOT_SERVED:
        if getattr(body, name) is not None:
            raise UnsupportedParameter(f"{name} is not served: leave it out", param=name)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedParameter(
            f"best_of is {body.best_of}: only n answers are made; leave it out", param="best_of"
        )
    if body.use_beam_search:
        _check_beams(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.timeout_s is not None and not 0 < body.timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout_s is {body.timeout_s}, allowed are seconds over 0, up to {MAX_TIMEOUT_S:g}",
            param="timeout_s",
        )
    if len(body.request_id or "") > MAX_SALT:
        raise RequestError(
            f"request_id has over {MAX_SALT} characters: shorten it", param="request_id"
        )


def beam_params(body: SamplingFields, params: SamplingParams, room: int) -> BeamSearchParams | None:
    """How to search, where the request wants beam search; `room` tokens fit behind the prompt."""
    if not body.use_beam_search:
        return None
    try:
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=max(1, room) if params.max_tokens is None else params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
    except RequestError as error:
        error.name_field("n" if error.param == "beam_width" else error.param)
        raise


def _check_beams(body: SamplingFields) -> None:
    """Beam search asks the model for its likeliest tokens, and nothing changes or cuts those."""
    for name in (*_NOT_WITH_BEAMS, "logprobs", "top_logprobs"):
        if getattr(body, name, None) not in (None, False, 0):
            raise RequestError(f"{name} does not go with use_beam_search", param=name)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
