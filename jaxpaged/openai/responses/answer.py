"""A response as it grows: its items, and the events that tell of them."""

import time
import uuid
from typing import Any

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.openai.chunks import Usage
from jaxpaged.openai.parsed import ParsedAnswer
from jaxpaged.openai.responses.schema import ResponsesRequest
from jaxpaged.text.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning

type Fields = dict[str, Any]

ENDED = ("completed", "incomplete", "failed", "cancelled")


class ResponseAnswer:
    """One response. `fields` is what its JSON holds now."""

    def __init__(
        self, body: ResponsesRequest, model: str, answer_id: str, answer: ParsedAnswer, usage: Usage
    ):
        self._answer, self._usage = answer, usage
        self._num_events = 0
        self._num_reasoning_tokens = 0
        self._open: Any = None  # kind of the open item, or its call's place
        self.message: Fields = {"role": "assistant", "content": ""}  # as a later request sees it
        self.fields = _fields(body, model, f"resp_{answer_id}")

    @property
    def is_ended(self) -> bool:
        return self.fields["status"] in ENDED

    def begin(self) -> list[Fields]:
        """The events before any output."""
        self.fields["status"] = "in_progress"
        return [self._response("response.created"), self._response("response.in_progress")]

    def take(self, output: RequestOutput) -> list[Fields]:
        """The events of an output."""
        (part,) = output.outputs
        if not self._usage.prompt_tokens:
            self._usage.add_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
        self._usage.completion_tokens += len(part.token_ids)
        ends = part.finish_reason is not None
        events: list[Fields] = []
        pieces = self._answer.read(part.text, ends=ends)
        for piece in pieces:
            events += self._piece(piece)
        self._num_reasoning_tokens += self._num_thoughts(pieces, part)
        if not ends:
            return events
        self._usage.times = output.times
        if part.finish_reason == "abort":
            return events + self.cancel()
        is_cut = part.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events += self._close(status)
        self._has_ended(status)
        if is_cut:
            self.fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._response(f"response.{status}")]

    def fail(self, message: str) -> list[Fields]:
        """The events of a response that could not be finished."""
        events = self._close("incomplete")
        self.fields["status"] = "failed"
        self.fields["error"] = {"code": "server_error", "message": message}
        return [*events, self._response("response.failed")]

    def cancel(self) -> list[Fields]:
        """The events of a response that was ended; no event has its name, this one ends streams."""
        events = self._close("incomplete")
        self._has_ended("cancelled")
        return [*events, self._response("response.incomplete")]

    def _num_thoughts(self, pieces: list[AnswerPart], part: CompletionOutput) -> int:
        """Tokens of reasoning; by characters where one output holds its end."""
        if self._answer.is_reasoning:
            return len(part.token_ids)
        thoughts = sum(len(piece.text) for piece in pieces if isinstance(piece, Reasoning))
        return round(len(part.token_ids) * thoughts / max(1, len(part.text)))

    def _piece(self, piece: AnswerPart) -> list[Fields]:
        kind: Any = piece.place if isinstance(piece, CallStart | CallArguments) else type(piece)
        events: list[Fields] = []
        if kind != self._open:
            events += self._close("completed")
            self._open = kind
            events += self._begin_item(piece)
        item = self.fields["output"][-1]
        match piece:
            case CallStart():
                return events
            case CallArguments(_, text):
                item["arguments"] += text
                self.message["tool_calls"][-1]["function"]["arguments"] += text
                event = self._event("response.function_call_arguments.delta", item, delta=text)
            case Content(text):
                item["content"][0]["text"] += text
                self.message["content"] += text
                event = self._part_event(
                    "response.output_text.delta", item, delta=text, logprobs=[]
                )
            case Reasoning(text):
                item["content"][0]["text"] += text
                self.message["reasoning"] = self.message.get("reasoning", "") + text
                event = self._part_event("response.reasoning_text.delta", item, delta=text)
        return [*events, event]

    def _begin_item(self, piece: AnswerPart) -> list[Fields]:
        item, part = _new_item(piece), None
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            call = {"id": piece.call_id, "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(call)
        else:
            kind = "reasoning_text" if isinstance(piece, Reasoning) else "output_text"
            part = {"type": kind, "text": ""}
            if kind == "output_text":
                part |= {"annotations": [], "logprobs": []}
        self.fields["output"].append(item)
        added = self._event("response.output_item.added", None, item=_copy(item))
        if part is None:
            return [added]
        item["content"].append(part)
        return [added, self._part_event("response.content_part.added", item, part=dict(part))]

    def _close(self, status: str) -> list[Fields]:
        """End the open item."""
        if self._open is None:
            return []
        self._open = None
        item = self.fields["output"][-1]
        item["status"] = status
        events: list[Fields] = []
        if item["type"] == "function_call":
            more = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", item, **more))
        else:
            part = item["content"][0]
            more = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{part['type']}.done"
            events.append(self._part_event(name, item, text=part["text"], **more))
            events.append(self._part_event("response.content_part.done", item, part=dict(part)))
        events.append(self._event("response.output_item.done", None, item=_copy(item)))
        return events

    def _response(self, name: str) -> Fields:
        return self._numbered(name) | {"response": self.fields | {"output": self._items()}}

    def _items(self) -> list[Fields]:
        return [_copy(item) for item in self.fields["output"]]

    def _event(self, kind: str, owner: Fields | None, **more: Any) -> Fields:
        place: Fields = {"output_index": len(self.fields["output"]) - 1}
        if owner is not None:
            place["item_id"] = owner["id"]
        return self._numbered(kind) | place | more

    def _part_event(self, kind: str, owner: Fields, **more: Any) -> Fields:
        return self._event(kind, owner, content_index=0, **more)

    def _numbered(self, name: str) -> Fields:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1}

    def _has_ended(self, status: str) -> None:
        usage = self._usage
        told = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        self.fields |= {"status": status, "usage": told} | usage.metrics()


def _new_item(piece: AnswerPart) -> Fields:
    number = uuid.uuid4().hex
    match piece:
        case Reasoning():
            return {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [],
                    "status": "in_progress"}  # fmt: skip
        case Content():
            return {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": [],
                    "status": "in_progress"}  # fmt: skip
        case CallStart(_, call_id, name):
            return {"id": f"fc_{number}", "type": "function_call", "call_id": call_id,
                    "name": name, "arguments": "", "status": "in_progress"}  # fmt: skip
        case CallArguments():
            raise AssertionError("arguments come after their call's start")


def _copy(item: Fields) -> Fields:
    """An item as it is now; it goes on growing."""
    if "content" not in item:
        return dict(item)
    return item | {"content": [dict(part) for part in item["content"]]}


def _fields(body: ResponsesRequest, model: str, response_id: str) -> Fields:
    reasoning = body.reasoning or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
