"""The JSON of answers, whole and in chunks. What stays the same in a stream is encoded once."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode

COMPLETION, CHAT = "text_completion", "chat.completion"


@dataclass(frozen=True)
class Envelope:
    """What every chunk of an answer begins with."""

    answer_id: str
    created: int
    model: str
    fingerprint: str | None  # of the server

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str | None = None) -> "Envelope":
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass
class Usage:
    """Tokens of one HTTP request, over all its prompts and answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChunkWriter:
    """Events of one stream. `usage` null stands in every chunk where the client asked for usage."""

    def __init__(self, envelope: Envelope, kind: str, *, with_usage: bool, each_usage: bool):
        self._head = b"data: " + encode(envelope.fields(kind))[:-1] + b',"choices":['
        self._with_usage, self._each_usage = with_usage, each_usage
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        is_chat = kind != COMPLETION
        self._field = b',"delta":{"content":' if is_chat else b',"text":'
        self._close = b'},"logprobs":null' if is_chat else b',"logprobs":null'
        self._back = self._close + b',"finish_reason":null}' + self._tail
        self._fronts: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The common chunk: some text, nothing else."""
        front = self._fronts.get(index)
        if front is None:
            front = self._head + b'{"index":%d' % index + self._field
            self._fronts[index] = front
        return front + encode(text) + self._back

    def end(self, index: int, text: str, reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of an answer that is plain text."""
        ending = b',"finish_reason":%b,"stop_reason":%b}' % (encode(reason), encode(stop_reason))
        front = self._head + b'{"index":%d' % index + self._field
        return front + encode(text) + self._close + ending + self._tail

    def choices(
        self, choices: Sequence[dict[str, Any]], usage: Usage, beside: dict[str, Any] | None = None
    ) -> bytes:
        """Any other chunk, perhaps with fields of its own."""
        tail = self._tail
        if self._each_usage:
            tail = b'],"usage":' + encode(usage.fields()) + b"}\n\n"
        if beside:
            tail = b"]," + encode(beside)[1:-1] + tail[1:]
        return self._head + encode(choices)[1:-1] + tail

    def last(self, usage: Usage) -> bytes:
        """The chunk of usage alone, or nothing where it was not asked for."""
        if not self._with_usage:
            return b""
        return self._head + b'],"usage":' + encode(usage.fields()) + b"}\n\n"
