"""An answer whose text holds more than content: reasoning, calls of tools."""

from typing import Any, NamedTuple

from jaxpaged.text.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from jaxpaged.text.reasoning import ReasoningParser
from jaxpaged.text.tools import ToolParser


class ToolReading(NamedTuple):
    """What a tool parser found in an answer that has ended."""

    has_calls: bool
    is_broken: bool  # some text began a call and departed from its format


class ParsedAnswer:
    """Reads one answer, in pieces or whole, and writes it in OpenAI's shape."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool = True,
    ):
        self._reasoning, self._tools = reasoning, tools
        self._shows_reasoning = shows_reasoning
        self._has_calls = self._is_ended = False

    @property
    def is_reasoning(self) -> bool:
        """Reasoning goes on."""
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def reading(self) -> ToolReading | None:
        """What came of looking for calls; None without tools, or where the answer goes on."""
        if self._tools is None or not self._is_ended:
            return None
        return ToolReading(self._has_calls, self._tools.has_broken_calls)

    def read(self, text: str, *, ends: bool) -> list[AnswerPart]:
        """The parts that more text makes certain; all that is left where the text `ends`."""
        parts: list[AnswerPart] = [Content(text)]
        self._is_ended = ends
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
            if ends:
                parts += self._reasoning.finish()
        if self._tools is not None:
            parts = self._with_calls(parts, self._tools)
            if ends:
                parts += self._tools.finish()
        self._has_calls = self._has_calls or any(isinstance(p, CallStart) for p in parts)
        if not self._shows_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        return parts

    def delta(self, text: str, *, ends: bool) -> dict[str, Any]:
        """What to stream; empty while nothing is certain."""
        parts = self.read(text, ends=ends)
        delta: dict[str, Any] = {}
        reasoning, content = _texts(parts)
        if reasoning:
            delta["reasoning"] = reasoning
        if content:
            delta["content"] = content
        pieces = _call_pieces(parts)
        if pieces:
            delta["tool_calls"] = pieces
        return delta

    def message(self, text: str) -> dict[str, Any]:
        """The whole answer."""
        parts = self.read(text, ends=True)
        reasoning, content = _texts(parts)
        calls = _whole_calls(parts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not (calls or reasoning) else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, or that tools are to be called."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    @staticmethod
    def _with_calls(parts: list[AnswerPart], tools: ToolParser) -> list[AnswerPart]:
        read: list[AnswerPart] = []
        for part in parts:
            read += tools.push(part.text) if isinstance(part, Content) else [part]
        return read


def _texts(parts: list[AnswerPart]) -> tuple[str, str]:
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Content))


def _call_pieces(parts: list[AnswerPart]) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            head = {"index": part.place, "id": part.call_id, "type": "function"}
            pieces.append(head | {"function": function})
        elif isinstance(part, CallArguments):
            if pieces and pieces[-1]["index"] == part.place:
                pieces[-1]["function"]["arguments"] += part.text
            else:
                pieces.append({"index": part.place, "function": {"arguments": part.text}})
    return pieces


def _whole_calls(parts: list[AnswerPart]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[part.place]["function"]["arguments"] += part.text
    return calls
