"""What clients may send. null is the same as leaving a field out; unknown fields are ignored."""

import re
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from jaxpaged.errors import RequestError
from jaxpaged.openai.json_bounds import out_of_bounds

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


# what fits the wire to the engine; from 2**62 on a request is in the background
type Priority = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetection(msgspec.Struct):
    """Ends an answer that repeats a pattern of so many tokens so often."""

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None  # tokens a chunk, but for the first
    priority: Priority | None = None
    cache_salt: str | None = None
    explain: bool | None = None
    user: str | None = None
    structured_outputs: Any = None
    response_format: Any = None
    request_id: str | None = None  # the client's own; only echoed
    timeout_s: float | None = None  # for the whole answer
    truncate_prompt_tokens: int | None = None  # keep so many; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # what is cut off; left by default
    use_beam_search: bool | None = None  # n is the width then
    length_penalty: float | None = None  # of beam search
    # known and not served: anything but null is refused
    best_of: int | None = None
    prompt_embeds: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    kv_transfer_params: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: Any = None  # text, token ids, or a list of either; looked at by `prompts.py`
    add_special_tokens: bool | None = None  # round a prompt that is text, as the tokenizer does
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    echo: bool | None = None  # the answer begins with the assistant's last message
    return_prompt_text: bool | None = None  # what the template wrote
    add_special_tokens: bool | None = None  # beside those that the template writes
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None  # of reasoning, whose end is forced then; -1: no limit
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    chat_template: str | None = None  # only with --trust-request-chat-template
    modalities: list[str] | None = None
    audio: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of /inference/v1/generate; the sampling parameters are those of completions."""

    token_ids: list[int]
    model: str | None = None
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    request_id: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of /inference/v1/abort_requests."""

    request_ids: list[str]


class ConversationFields(msgspec.Struct, kw_only=True):
    """Messages and how the chat template writes them."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeRequest(ConversationFields, kw_only=True):
    """Body of /tokenize: a prompt or messages."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class PrefixRequest(ConversationFields, kw_only=True):
    """Body of /v1/cache/prefixes: one of prompt, messages and prompt_token_ids."""

    prompt: Any = None  # text or token ids
    prompt_token_ids: list[int] | None = None
    cache_salt: str | None = None
    shared: bool | None = None  # found by all clients


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def decode_body[T](data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Read JSON into a request.

    Raises:
        RequestError: no JSON, JSON nested too deep or of too many values, or a field of another
            type; `param` is the field's path.
    """
    found = out_of_bounds(data)
    if found is not None:
        raise RequestError(f"the body is {found}")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _refuse(text: str) -> NoReturn:
    found = _PLACE.match(text)
    what, path = (found["what"], found["path"]) if found else (text, None)
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        raise RequestError(f"{path} is missing", param=path)
    what = what[:1].lower() + what[1:]
    raise RequestError(f"{path or 'the body'}: {what}", param=path or None)
