"""What clients of /v1/responses may send. null is the same as leaving a field out."""

from typing import Any

import msgspec

from jaxpaged.openai.schema import decode_body


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: Any = None  # text or a list of items; looked at by `convert.py`
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # known and not served
    truncation: str | None = None
    top_logprobs: int | None = None
    conversation: Any = None
    prompt: Any = None


_RESPONSES = msgspec.json.Decoder(ResponsesRequest)


def read_responses(data: bytes) -> ResponsesRequest:
    """The body of a request, or a RequestError that names the field."""
    return decode_body(data, _RESPONSES)
