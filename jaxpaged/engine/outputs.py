"""What a caller gets: vLLM's output types, fields of the same names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxpaged.core.request import AnswerTimes


class Logprob(NamedTuple):
    """One token's log-probability at one place, its rank from 1, and its text.

    The rank of a token that was asked for by `logprob_token_ids` is not known.
    """

    logprob: float
    rank: int | None
    decoded_token: str


type PlaceLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One answer to a prompt, as far as it is known."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[PlaceLogprobs] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None


@dataclass
class RequestMetrics:
    """Times in seconds on the monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    times: AnswerTimes | None = None  # as the engine measured them, of the answer that ended last


@dataclass
class RequestOutput:
    """A request and its answers, whole or (with OutputKind.DELTA) what is new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PlaceLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)
    error: str | None = None  # why the engine gave the request up

    @property
    def times(self) -> AnswerTimes | None:
        """Of the answer that ended last, as the engine measured them."""
        return None if self.metrics is None else self.metrics.times
