"""What the front and an engine in a process of its own say to each other, and how it is framed.

A message is its length in four bytes, then MessagePack. All events of a step are one message.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Pin, TokenEvent
from jaxpaged.errors import (
    CapacityError,
    ConfigError,
    EngineStopped,
    InvariantError,
    JaxPagedError,
    RateLimited,
    RequestError,
    WeightsError,
)
from jaxpaged.metrics import EngineLoad

_LENGTH = struct.Struct("<I")
_KINDS: dict[str, type[JaxPagedError]] = {
    "request": RequestError,
    "capacity": CapacityError,
    "rate": RateLimited,
    "config": ConfigError,
    "weights": WeightsError,
    "invariant": InvariantError,
    "stopped": EngineStopped,
}


class Start(msgspec.Struct, tag="start"):
    """The first message: what to load."""

    config: EngineConfig
    log_level: str
    show_progress: bool


class Submit(msgspec.Struct, tag="submit"):
    """A request; answered by `Reply` or `Refusal` of the same `call_id`, then come its events."""

    call_id: int
    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    key_name: str
    pin: Pin | None = None


class Release(msgspec.Struct, tag="release"):
    """The caller is done with a request; one that has not finished is aborted."""

    request_id: str
    is_finished: bool


class Call(msgspec.Struct, tag="call"):
    """Any other method of the engine; answered by `Reply` or `Refusal`."""

    call_id: int
    method: str
    arguments: list[Any]


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded."""

    config: EngineConfig
    vocab: int
    max_model_len: int
    default_sampling: dict[str, Any]
    load: EngineLoad
    device_share: float = 0.0  # of a GPU's memory, that another engine must leave to this one


class Events(msgspec.Struct, tag="events"):
    """What a step gave, and the engine's state after it."""

    events: list[TokenEvent]
    load: EngineLoad


class Beat(msgspec.Struct, tag="beat"):
    """Says a few times a second that the process is alive, and how its engine fares."""

    seconds_without_progress: float
    has_work: bool
    load: EngineLoad


class Reply(msgspec.Struct, tag="reply"):
    """What a call gave; of `Submit`, how many tokens may be sampled and with which seed."""

    call_id: int
    value: Any = None


class Refusal(msgspec.Struct, tag="refusal"):
    """An error, of a call or of a request that was accepted before."""

    kind: str
    text: str
    call_id: int | None = None
    request_id: str | None = None
    param: str | None = None
    retry_after_s: float = 1.0

    @classmethod
    def of(
        cls, error: BaseException, call_id: int | None = None, request_id: str | None = None
    ) -> "Refusal":
        kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "stopped")
        return cls(
            kind,
            str(error).encode(errors="backslashreplace").decode(),  # half pairs do not travel
            call_id,
            request_id,
            getattr(error, "param", None),
            getattr(error, "retry_after_s", 1.0),
        )

    def error(self) -> JaxPagedError:
        """The error as it was raised, on this side."""
        kind = _KINDS.get(self.kind, EngineStopped)
        if issubclass(kind, RequestError):
            return kind(self.text, param=self.param)
        if issubclass(kind, CapacityError | RateLimited):
            return kind(self.text, retry_after_s=self.retry_after_s)
        return kind(self.text)


type ToEngine = Start | Submit | Release | Call
type ToFront = Ready | Events | Beat | Reply | Refusal

_encoder = msgspec.msgpack.Encoder()
to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(
    Start | Submit | Release | Call
)
to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(
    Ready | Events | Beat | Reply | Refusal
)


def frame(message: ToEngine | ToFront) -> bytes:
    """A message as bytes."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`."""
        rest = self._rest
        rest += data
        start = 0
        while len(rest) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest, start)
            end = start + _LENGTH.size + length
            if len(rest) < end:
                break
            yield bytes(rest[start + _LENGTH.size : end])
            start = end
        del rest[:start]
