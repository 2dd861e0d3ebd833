"""From Anthropic's request to a chat request, so that both are checked and served alike."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxpaged.anthropic.schema import CountRequest, MessagesRequest, ToolChoice
from jaxpaged.errors import RequestError, UnsupportedParameter
from jaxpaged.openai.chat import naming_fields
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.prompts import as_list, as_object
from jaxpaged.openai.schema import ChatRequest

type Block = dict[str, Any]

_NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens",
          "thinking_token_budget": "thinking.budget_tokens"}  # fmt: skip


def _own_name(param: str) -> str:
    """The request's field for one of the chat request that is made of it."""
    inside = param.replace(".function.parameters", ".input_schema").replace(".function.", ".")
    return _NAMES.get(param, inside)


naming_its_fields = partial(naming_fields, own_name=_own_name)


def chat_request(body: CountRequest) -> ChatRequest:
    """The same request in OpenAI's shape.

    Raises:
        RequestError: a role, block or choice that has no meaning here.
    """
    messages = _system(body.system)
    for place, message in enumerate(body.messages):
        messages += _messages(f"messages[{place}]", message)
    goes_on = bool(body.messages) and body.messages[-1].get("role") == "assistant"
    choice, parallel = _choice(body.tool_choice)
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(i, tool) for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        continue_final_message=goes_on,
        include_reasoning=True,
    )
    if body.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {body.max_tokens}, it must be at least 1", param="max_tokens"
            )
        chat.max_completion_tokens, chat.stream = body.max_tokens, body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.stop = body.stop_sequences
    return chat


def _system(system: str | list[Block] | None) -> list[Block]:
    if not system:
        return []
    text = system if isinstance(system, str) else _text("system", system)
    return [{"role": "system", "content": text}]


def _messages(where: str, message: Block) -> list[Block]:
    """One message may be several of a chat: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [as_object(block) for block in as_list(content) or [None]]
    checked = [block for block in blocks if block is not None]
    if len(checked) != len(blocks):
        raise RequestError(
            f"{where}.content must be text or a list of blocks", param=f"{where}.content"
        )
    read = _user if role == "user" else _assistant
    return read(f"{where}.content", checked)


def _user(where: str, blocks: Sequence[Block]) -> list[Block]:
    messages: list[Block] = []
    texts: list[Block] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            inner = block.get("content")
            text = inner if isinstance(inner, str) else _text(where, as_list(inner) or [])
            name = block.get("tool_use_id")
            messages.append({"role": "tool", "tool_call_id": name, "content": text})
        else:
            texts.append(block)
    if texts:
        messages.append({"role": "user", "content": _text(where, texts)})
    return messages


def _assistant(where: str, blocks: Sequence[Block]) -> list[Block]:
    message: Block = {"role": "assistant"}
    calls = [_call(where, block) for block in blocks if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking")) for block in blocks if block.get("type") == "thinking"]
    apart = ("tool_use", "thinking", "redacted_thinking")
    message["content"] = _text(where, [b for b in blocks if b.get("type") not in apart])
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return [message]


def _call(where: str, block: Block) -> Block:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or as_object(given) is None:
        raise RequestError(f"{where} has a tool_use without name or input", param=where)
    function = {"name": name, "arguments": encode(given).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


def _text(where: str, blocks: Sequence[Any]) -> str:
    texts: list[str] = []
    for given in blocks:
        block = as_object(given) or {}
        if block.get("type") != "text":
            raise UnsupportedParameter(
                f"{where} has a block of type {str(block.get('type'))[:40]!r}: only text, "
                "tool_use, tool_result and thinking are served",
                param=where,
            )
        if not isinstance(block.get("text"), str):
            raise RequestError(f"{where} has a text block without text", param=where)
        texts.append(block["text"])
    return "\n".join(texts)


def _tool(place: int, tool: Any) -> Block:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameter(
            f"tools[{place}].type is {tool.type[:40]!r}: only custom is served",
            param=f"tools[{place}].type",
        )
    function: Block = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> tuple[Any, bool | None]:
    """OpenAI's tool_choice and parallel_tool_calls."""
    if choice is None:
        return None, None
    parallel = (
        None if choice.disable_parallel_tool_use is None else (not choice.disable_parallel_tool_use)
    )
    if choice.type == "tool" and choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}, parallel
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        raise RequestError(
            "tool_choice.type must be auto, any, none, or tool with a name",
            param="tool_choice.type",
        )
    return names[choice.type], parallel
