"""What clients of /v1/messages may send. null is the same as leaving a field out."""

from typing import Any

import msgspec

from jaxpaged.openai.schema import decode_body


class Tool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens, and what a message has in common with it."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountRequest)


def read_messages(data: bytes) -> MessagesRequest:
    """The body of a request, or a RequestError that names the field."""
    return decode_body(data, _MESSAGES)


def read_count(data: bytes) -> CountRequest:
    return decode_body(data, _COUNT)
