"""The JSON of answers, whole and in chunks. What stays the same in a stream is encoded once."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpaged.core.request import AnswerTimes

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


class AnswerMetrics(msgspec.Struct):
    """Times of an answer, in milliseconds, under vLLM's names. null is what it did not come to."""

    time_to_first_token_ms: float | None  # from its first step
    queue_time_ms: float | None  # from arrival to its first step
    generation_time_ms: float | None  # from its first token to its last
    mean_itl_ms: float | None  # between two tokens
    tokens_per_second: float | None  # from its first step to its last token

    @classmethod
    def of(cls, times: AnswerTimes, num_tokens: int) -> "AnswerMetrics":
        queue_s, prefill_s, decode_s = times
        between_s = rate = None
        if prefill_s is not None and decode_s is not None:
            busy_s = prefill_s + decode_s
            between_s = decode_s / (num_tokens - 1) if num_tokens > 1 else None
            rate = round(num_tokens / busy_s, 3) if busy_s else None
        return cls(_ms(prefill_s), _ms(queue_s), _ms(decode_s), _ms(between_s), rate)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


@dataclass
class Usage:
    """Tokens of one HTTP request, over all its prompts and answers; and the times of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tells_times: bool = False  # as `metrics` of the answer
    times: AnswerTimes | None = None  # where there is but one answer, and it has ended

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

    def metrics(self) -> dict[str, AnswerMetrics | None]:
        """The field `metrics`, null where there are several answers; nothing where not wanted."""
        if not self.tells_times:
            return {}
        times = self.times
        return {"metrics": times and AnswerMetrics.of(times, self.completion_tokens)}


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
        """The chunk of usage and metrics alone, or nothing where it was not asked for."""
        if not self._with_usage:
            return b""
        fields = {"usage": usage.fields()} | usage.metrics()
        return self._head + b"]," + encode(fields)[1:] + b"\n\n"
