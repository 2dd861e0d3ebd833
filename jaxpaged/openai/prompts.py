"""What a request's prompt or messages hold, checked before anything is encoded."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from jaxpaged.core.params import check_ids
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import PromptTooLong, RequestError, UnsupportedParameter
from jaxpaged.openai.json_bounds import out_of_bounds
from jaxpaged.openai.schema import ChatRequest, ConversationFields, TokenizeRequest

MAX_PROMPTS = 2048  # prompts times n, in one request
MAX_TEMPLATE_KWARGS = 128
MAX_CUT_TEXT = 2**23  # characters of a text of which truncate_prompt_tokens keeps a part

type Prompt = str | list[int]


def completion_prompts(
    prompt: Any,
    n: int,
    engine: ServedEngine,
    max_tokens: int | None,
    *,
    may_be_long: bool = False,
) -> list[Prompt]:
    """The prompts of a completion request: text or token ids, one or several.

    `max_tokens` are to follow each; None is as many as there is room for, at least one.

    Raises:
        RequestError: anything else; an id that is no token; more answers than one request may ask.
    """
    prompts = _as_list(prompt)
    if len(prompts) * n > MAX_PROMPTS:
        raise RequestError(
            f"prompt has {len(prompts)} entries and n is {n}: one request makes at most "
            f"{MAX_PROMPTS} answers",
            param="prompt",
        )
    for one in prompts:
        if isinstance(one, str):
            check_text(one, engine, is_cut=may_be_long)
            continue
        if len(one) > engine.max_model_len and not may_be_long:
            wanted = 1 if max_tokens is None else max_tokens
            raise PromptTooLong(len(one), wanted, engine.max_model_len)
        check_ids("prompt", one, engine.vocab)
    return prompts


def _as_list(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    items = as_list(prompt)
    kinds = set[type](map(type, items or ()))
    if items and (kinds == {str} or (kinds == {list} and all(items))):
        return items
    if items and not kinds & {str, list}:
        return [items]  # token ids, or what `check_ids` refuses
    raise RequestError(
        "prompt must be text, a list of texts, a list of token ids or a list of such lists, "
        "none of them empty",
        param="prompt",
    )


def check_text(
    text: str,
    engine: ServedEngine | ServedPooling,
    param: str = "prompt",
    *,
    is_cut: bool = False,
) -> None:
    """Refuse a text that cannot fit, before the work of encoding it.

    One whose tokens will be cut may be longer, though not as long as to occupy a thread for good.
    """
    most = _most_chars(engine)
    if is_cut and len(text) > max(most, MAX_CUT_TEXT):
        raise RequestError(
            f"{param} has {len(text)} characters, allowed are {max(most, MAX_CUT_TEXT)} of a text "
            "that is cut: shorten it",
            param=param,
        )
    if len(text) > most and not is_cut:
        raise RequestError(
            f"{param} has {len(text)} characters, over the {most} that the model's maximum context "
            f"length of {engine.max_model_len} tokens can hold: shorten it",
            param=param,
        )


def _most_chars(engine: ServedEngine | ServedPooling) -> int:
    """No longer text fits the model's context, whatever it says."""
    return engine.max_model_len * engine.tokenizer.max_token_chars


async def encode_chat(
    body: ChatRequest | ConversationFields,
    engine: ServedEngine,
    tools: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """A conversation as `{"prompt": text, "prompt_token_ids": ids}`, through the chat template.

    `tools` are those that the template is to show.
    """
    messages = [_checked_message(i, m) for i, m in enumerate(body.messages or ())]
    if not messages:
        raise RequestError("messages is empty: it needs at least one", param="messages")
    options = dict(body.chat_template_kwargs or {})
    if len(options) > MAX_TEMPLATE_KWARGS:
        raise RequestError(
            f"chat_template_kwargs has {len(options)} entries, allowed are {MAX_TEMPLATE_KWARGS}",
            param="chat_template_kwargs",
        )
    if isinstance(body, ChatRequest):
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.documents is not None:
            options.setdefault("documents", body.documents)
    goes_on = bool(body.continue_final_message)
    add_prompt = body.add_generation_prompt
    reserved = {
        "add_generation_prompt", "chat_template", "continue_final_message", "tools", "messages",
    }  # fmt: skip
    if reserved & options.keys():
        raise UnsupportedParameter(
            f"chat_template_kwargs holds {', '.join(sorted(reserved & options.keys()))}, which "
            "are fields of the request itself",
            param="chat_template_kwargs",
        )
    is_cut = isinstance(body, ChatRequest) and body.truncate_prompt_tokens is not None
    for text in _texts(messages):
        check_text(text, engine, "messages", is_cut=is_cut)
    if body.chat_template is not None and not engine.model_settings.trust_request_chat_template:
        raise UnsupportedParameter(
            "chat_template is not taken from requests here: the server would need "
            "--trust-request-chat-template",
            param="chat_template",
        )
    prompt = await engine.chat_prompt(
        messages,
        None if is_cut else _most_chars(engine),
        chat_template=body.chat_template,
        add_generation_prompt=not goes_on if add_prompt is None else add_prompt,
        continue_final_message=goes_on,
        tools=tools,
        **options,
    )
    if isinstance(body, ChatRequest | TokenizeRequest) and body.add_special_tokens:
        before, after = engine.tokenizer.surroundings
        prompt["prompt_token_ids"] = [*before, *prompt["prompt_token_ids"], *after]
    return prompt


def last_turn(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation's last message, if it is the assistant's."""
    last = _checked_message(len(messages) - 1, messages[-1])
    return "\n".join(_texts([last])) if last["role"] == "assistant" else ""


def _checked_message(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role is missing or no text", param=f"{where}.role")
    content = message.get("content")
    parts = as_list(content)
    if parts is not None:
        for part in parts:
            _check_part(f"{where}.content", part)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be text or a list of parts", param=f"{where}.content"
        )
    checked = dict(message)
    if parts is not None:  # a part may be its text alone
        checked["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        ]
    elif content is None:
        checked["content"] = ""  # templates would write None, or refuse a field that is missing
    if message.get("tool_calls"):
        checked["tool_calls"] = _parsed_calls(f"{where}.tool_calls", message["tool_calls"])
    if isinstance(message.get("reasoning"), str):
        checked.setdefault("reasoning_content", message["reasoning"])  # the templates' name
    return checked


def _check_part(where: str, given: Any) -> None:
    if isinstance(given, str):
        return
    part = as_object(given)
    if part is None:
        raise RequestError(f"{where} has a part that is no object and no text", param=where)
    kind = part.get("type")
    if kind != "text":
        raise UnsupportedParameter(
            f"{where} has a part of type {str(kind)[:40]!r}: only text is served", param=where
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has a text part without text", param=where)


def _parsed_calls(where: str, given: Any) -> list[dict[str, Any]]:
    """Templates want the arguments of a call as an object; clients send them as JSON text."""
    parsed: list[dict[str, Any]] = []
    for item in as_list(given) or [None]:
        call = as_object(item)
        if call is None:
            raise RequestError(f"{where} must be a list of calls", param=where)
        function = as_object(call.get("function")) or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            function = {**function, "arguments": parsed_arguments(where, arguments)}
        parsed.append({**call, "function": function})
    return parsed


def parsed_arguments(where: str, text: str) -> Any:
    """What the JSON text of a call's arguments holds; `where` names the call in a refusal."""
    data = text.encode() or b"{}"
    found = out_of_bounds(data)
    if found is not None:
        raise RequestError(f"{where} has arguments {found}", param=where)
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise RequestError(f"{where} has arguments that are no JSON", param=where) from None


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every message's own text, for the check of its length."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        texts += [part["text"] for part in as_list(content) or ()]
    return texts


def as_list(value: Any) -> list[Any] | None:
    """`value` if it is a JSON array."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def as_object(value: Any) -> dict[str, Any] | None:
    """`value` if it is a JSON object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
