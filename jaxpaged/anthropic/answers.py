"""Answers in Anthropic's shape: a message of blocks, whole or as events."""

from typing import Any

import msgspec

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.parsed import ParsedAnswer
from jaxpaged.text.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning

# there is no word for an answer that was ended from outside: it is cut
_STOP_REASONS = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer:
    """One message as it grows. `model` is the name that the client asked for."""

    def __init__(self, answer_id: str, model: str, answer: ParsedAnswer):
        self._id, self._model, self._answer = answer_id, model, answer
        self._num_prompt = self._num_cached = self._num_output = 0
        self._num_blocks = 0
        self._open: type[AnswerPart] | int | None = None  # kind of the open block, or its call
        self._is_started = False

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The message of a finished output."""
        (part,) = output.outputs
        self._count(output, part)
        blocks: list[dict[str, Any]] = []
        for piece in self._answer.read(part.text, ends=True):
            self._add(blocks, piece)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _as_object(block["input"])
        return self._message() | {
            "content": blocks,
            "stop_reason": self._stop_reason(part),
            "stop_sequence": _stop_sequence(part),
            "usage": self._usage(),
        }

    def events(self, output: RequestOutput) -> bytes:
        """What an output adds, as events."""
        (part,) = output.outputs
        self._count(output, part)
        events: list[bytes] = []
        if not self._is_started:
            self._is_started = True
            empty = {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = self._usage() | {"output_tokens": 0}
            events.append(
                _event("message_start", message=self._message() | empty | {"usage": usage})
            )
        ends = part.finish_reason is not None
        for piece in self._answer.read(part.text, ends=ends):
            events += self._piece(piece)
        if ends:
            events += self._close()
            delta = {"stop_reason": self._stop_reason(part), "stop_sequence": _stop_sequence(part)}
            events.append(_event("message_delta", delta=delta, usage=self._usage()))
            events.append(_event("message_stop"))
        return b"".join(events)

    def _piece(self, piece: AnswerPart) -> list[bytes]:
        """Events of one part; a part of another kind opens another block."""
        kind: Any = piece.place if isinstance(piece, CallStart | CallArguments) else type(piece)
        events: list[bytes] = []
        if kind != self._open:
            events += self._close()
            self._open = kind
            block = _empty_block(piece)
            events.append(
                _event("content_block_start", index=self._num_blocks, content_block=block)
            )
        match piece:
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
            case Content(text):
                delta = {"type": "text_delta", "text": text}
            case CallArguments(_, text):
                delta = {"type": "input_json_delta", "partial_json": text}
            case CallStart():
                return events
        events.append(_event("content_block_delta", index=self._num_blocks, delta=delta))
        return events

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._num_blocks += 1
        return [_event("content_block_stop", index=self._num_blocks - 1)]

    @staticmethod
    def _add(blocks: list[dict[str, Any]], piece: AnswerPart) -> None:
        """Put a part into the list of blocks; a call's input is its JSON text at first."""
        empty = _empty_block(piece)
        if isinstance(piece, CallStart):
            blocks.append(empty | {"input": ""})
            return
        if not blocks or blocks[-1]["type"] != empty["type"]:
            blocks.append(empty)
        field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[empty["type"]]
        blocks[-1][field] += piece.text

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _count(self, output: RequestOutput, part: CompletionOutput) -> None:
        self._num_prompt = len(output.prompt_token_ids)
        self._num_cached = output.num_cached_tokens
        self._num_output += len(part.token_ids)

    def _usage(self) -> dict[str, int]:
        """Prompt tokens that came from the prefix cache are counted apart."""
        return {
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
        }

    def _stop_reason(self, part: CompletionOutput) -> str:
        if isinstance(part.stop_reason, str):
            return "stop_sequence"
        reason = self._answer.finish_reason(part.finish_reason)
        return _STOP_REASONS.get(reason or "", "end_turn")


def failure(body: bytes) -> bytes:
    """An error in the middle of a stream; `body` is the JSON of the error."""
    return b"event: error\ndata: " + body + b"\n\n"


def _stop_sequence(part: CompletionOutput) -> str | None:
    return part.stop_reason if isinstance(part.stop_reason, str) else None


def _empty_block(piece: AnswerPart) -> dict[str, Any]:
    match piece:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Content():
            return {"type": "text", "text": ""}
        case CallStart(_, call_id, name):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case CallArguments():
            return {"type": "tool_use"}


def _as_object(text: str) -> Any:
    """A call's input; one that the token limit cut has none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name} | fields))
