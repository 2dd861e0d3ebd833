"""From a request of /v1/responses to a chat request, so that both are checked and served alike."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxpaged.errors import RequestError, UnsupportedParameter
from jaxpaged.openai.chat import naming_fields
from jaxpaged.openai.prompts import as_list, as_object, parsed_arguments
from jaxpaged.openai.responses.schema import ResponsesRequest
from jaxpaged.openai.schema import ChatRequest

type Item = dict[str, Any]

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco",
             "reasoning": "rs"}  # fmt: skip

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens",
          "max_tokens": "max_output_tokens", "response_format": "text.format"}  # fmt: skip
_TEXTS = ("input_text", "output_text", "text")


def chat_request(body: ResponsesRequest, history: Sequence[Item]) -> ChatRequest:
    """The same request in the shape of a chat; `history` are the messages of earlier responses.

    Raises:
        RequestError: an item, tool or format that has no meaning here.
    """
    _check_served(body)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatRequest(
        model=body.model,
        messages=[*messages, *history, *input_messages(body.input)],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=True,  # output comes in pieces also where the client wants the whole
        tools=[_tool(i, tool) for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=_effort(body.reasoning),
        response_format=_format(body.text),
    )


def _own_name(param: str) -> str:
    """The request's field for one of the chat request that is made of it."""
    return _NAMES.get(param, param.replace(".function.", "."))


naming_its_fields = partial(naming_fields, own_name=_own_name)


def input_items(given: Any) -> list[Item]:
    """What `input` holds, once it has passed as messages, as it is listed: items with ids."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_listed(as_object(item) or {}) for item in as_list(given) or []]


def _listed(item: Item) -> Item:
    kind, name = item.get("type", "message"), item.get("id")
    if not isinstance(name, str):
        name = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
    listed = item | {"id": name, "type": kind}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": content}]
    return listed | {"status": "completed"}


def input_messages(given: Any) -> list[Item]:
    """The messages that `input` stands for; an assistant's neighbouring items are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items = as_list(given)
    if not items:
        raise RequestError("input must be text or a list of items, not empty", param="input")
    messages: list[Item] = []
    for place, raw in enumerate(items):
        where = f"input[{place}]"
        item = as_object(raw)
        if item is None:
            raise RequestError(f"{where} must be an object", param=where)
        _add(messages, where, item)
    return messages


def _add(messages: list[Item], where: str, item: Item) -> None:
    match item.get("type", "message"):
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise RequestError(f"{where}.role is none of {', '.join(_ROLES)}", param=where)
            text = _text(f"{where}.content", item.get("content"))
            if role == "assistant":
                turn = _turn(messages)
                turn["content"] += text
            else:
                messages.append({"role": role, "content": text})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(value, str) for value in function.values()):
                raise RequestError(f"{where} needs name and arguments as text", param=where)
            parsed_arguments(where, item["arguments"])
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = _text(f"{where}.output", item.get("output"))
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
            messages.append(result)
        case "reasoning":
            parts = as_list(item.get("content")) or []
            texts = [(as_object(part) or {}).get("text") for part in parts]
            _turn(messages)["reasoning"] = "".join(t for t in texts if isinstance(t, str))
        case other:
            raise UnsupportedParameter(
                f"{where}.type is {str(other)[:40]!r}: only message, function_call, "
                "function_call_output and reasoning are served",
                param=where,
            )


def _turn(messages: list[Item]) -> Item:
    """The assistant's message at the end; a new one where the last is somebody else's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for raw in as_list(content) or [None]:
        part = as_object(raw) or {}
        if part.get("type") not in _TEXTS:
            raise UnsupportedParameter(
                f"{where} has a part of type {str(part.get('type'))[:40]!r}: only text is served",
                param=where,
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a text part without text", param=where)
        texts.append(part["text"])
    return "\n".join(texts)


def _tool(place: int, tool: Item) -> Item:
    if tool.get("type") != "function":
        raise UnsupportedParameter(
            f"tools[{place}].type is {str(tool.get('type'))[:40]!r}: only function is served",
            param=f"tools[{place}].type",
        )
    kept = ("name", "description", "parameters")
    return {"type": "function", "function": {k: tool[k] for k in kept if tool.get(k) is not None}}


def _choice(given: Any) -> Any:
    """OpenAI's tool_choice of a chat; what it does not know is refused there."""
    choice = as_object(given)
    if choice is None:
        return given
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        named = [(as_object(tool) or {}).get("name") for tool in as_list(choice.get("tools")) or []]
        tools = [{"type": "function", "function": {"name": name}} for name in named]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _effort(reasoning: Item | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning.effort must be text", param="reasoning.effort")
    return effort


def _format(text: Item | None) -> Item | None:
    raw = (text or {}).get("format")
    given = as_object(raw)
    if given is None and raw is not None:
        raise RequestError(
            'text.format must be an object with a type, as {"type": "text"}', param="text.format"
        )
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_schema":
        inner = {key: value for key, value in given.items() if key != "type"}
        return {"type": "json_schema", "json_schema": inner}
    return given


def _check_served(body: ResponsesRequest) -> None:
    for name in ("conversation", "prompt", "top_logprobs"):
        if getattr(body, name):
            raise UnsupportedParameter(f"{name} is not served: leave it out", param=name)
    if body.truncation not in (None, "disabled"):
        raise UnsupportedParameter(
            "truncation: only disabled is served; send a shorter input", param="truncation"
        )
    if body.background and body.store is False:
        raise RequestError("background needs store: leave store out", param="background")
