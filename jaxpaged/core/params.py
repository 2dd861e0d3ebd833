"""Sampling parameters with vLLM's names and defaults, checked when made."""

# pyright: reportUnnecessaryIsInstance=false

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from jaxpaged.core.repetition import RepetitionDetectionParams
from jaxpaged.core.structured import ReasoningMarks, StructuredOutputsParams
from jaxpaged.errors import RequestError, UnsupportedParameter

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_WORD = 1024  # characters of a stop string or a banned word
MAX_BIASES = 512  # logit biases, banned words and ids of one row together


_WHOLE = (
    "n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "stream_interval",
)  # fmt: skip
_REAL = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p",
)  # fmt: skip
_OBJECTS = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


class OutputKind(enum.Enum):
    """How a stream of outputs relates: all text so far, only the new part, or only the last."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt; field names and defaults are vLLM's.

    Temperature 0 is greedy. `top_k` 0 or -1 keeps all tokens. `max_tokens` None means up to the
    model's context. Token ids are bounded later, by `check_token_ids`, when the model is known.

    Raises:
        RequestError: a value outside its range; `param` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None  # told at each place instead of the likeliest
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens a piece of a stream, but for the first
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[str] | None = None  # names given to LLM(logits_processors=...)
    skip_reading_prefix_cache: bool = False
    # share also the page that the prompt ends in, by copy, with requests that say the same: for
    # prompts that go on where others end
    copies_begun_page: bool = False
    explain: bool = False  # keep what the scheduler did, see docs/scheduling.md
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    reasoning: ReasoningMarks | None = None  # where a grammar waits for its end, or it has a limit
    extra_args: dict[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self):
        for name in (*_WHOLE, *_REAL):
            self._read_number(name, int if name in _WHOLE else float)
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors"):
            self._read_list(name)
        if self.allowed_token_ids is not None:
            self._read_list("allowed_token_ids")
        if self.logprob_token_ids is not None:
            self._read_list("logprob_token_ids")
            ids = self.logprob_token_ids
            if not 1 <= len(ids) <= MAX_LOGPROBS:
                raise RequestError(
                    f"logprob_token_ids has {len(ids)} entries, allowed are 1 to {MAX_LOGPROBS}",
                    param="logprob_token_ids",
                )
            object.__setattr__(self, "logprobs", len(ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_numbers()
        self._check_lists()
        for name, kind in _OBJECTS.items():
            given = getattr(self, name)
            if not isinstance(given, kind | None):
                raise RequestError(
                    f"{name} is {type(given).__name__}: give {kind.__name__}(...)", param=name
                )

    def _read_number(self, name: str, kind: type[int] | type[float]) -> None:
        """Take a number of NumPy for Python's; the sampler's code relies on those."""
        value = getattr(self, name)
        if value is None or type(value) is int or type(value) is kind:
            return
        is_whole = isinstance(value, Integral)
        if isinstance(value, bool) or not (is_whole or (kind is float and isinstance(value, Real))):
            what = "whole number" if kind is int else "number"
            raise RequestError(f"{name} is {value!r}, which is no {what}", param=name)
        object.__setattr__(self, name, int(value) if is_whole else float(value))

    def _read_list(self, name: str) -> None:
        """Take one text for a list of one, and what else goes through as one for a tuple."""
        value = getattr(self, name)
        try:
            items = (value,) if isinstance(value, str) else () if value is None else tuple(value)
        except TypeError:
            raise RequestError(f"{name} is {value!r}: give a list", param=name) from None
        if name.endswith("_ids") and not set(map(type, items)) <= {int, bool}:
            items = tuple(int(item) if isinstance(item, Integral) else item for item in items)
        object.__setattr__(self, name, items)

    def _check_numbers(self) -> None:
        _check_range("n", self.n, 1, MAX_CHOICES)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _check_range("temperature", self.temperature, 0.0, 1e4)
        _check_range("top_p", self.top_p, 1e-9, 1.0)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.stream_interval is not None:
            _check_range("stream_interval", self.stream_interval, 1, 2**31 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, over max_tokens of {self.max_tokens}: "
                    "lower it",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value == -1:
                raise UnsupportedParameter(
                    f"{name} -1 (the whole vocabulary) is not served: ask for 0 to {MAX_LOGPROBS}",
                    param=name,
                )
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            strings = getattr(self, name)
            if len(strings) > limit:
                raise RequestError(
                    f"{name} has {len(strings)} entries, at most {limit} are allowed", param=name
                )
            if any(not isinstance(string, str) or not string for string in strings):
                raise RequestError(
                    f"{name} holds an empty entry or one that is no string: leave it out",
                    param=name,
                )
            longest = max(map(len, strings), default=0)
            if longest > MAX_WORD:
                raise RequestError(
                    f"{name} has an entry of {longest} characters, allowed are {MAX_WORD}",
                    param=name,
                )
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError("logit_bias is no mapping from ids to numbers", param="logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, Real) or not math.isfinite(bias) or abs(bias) > 100:
                raise RequestError(
                    f"logit_bias of token {token} is {bias}, allowed are -100 to 100",
                    param="logit_bias",
                )
        if len(self.logit_bias or {}) > MAX_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias or {})} entries, allowed are {MAX_BIASES}",
                param="logit_bias",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: leave it out to allow all", param="allowed_token_ids"
            )

    @cached_property
    def has_penalties(self) -> bool:
        return (
            bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0
        )

    @cached_property
    def needs_full_sampler(self) -> bool:
        """Bans and biases are not enough."""
        return self.has_penalties or bool(self.logits_processors) or self.logprobs is not None

    @cached_property
    def needs_edits(self) -> bool:
        """The row's logits are changed, or told (stop ids count: min_tokens bans them)."""
        return (
            self.needs_full_sampler
            or bool(self.logit_bias or self.bad_words)
            or self.allowed_token_ids is not None
            or self.min_tokens > 0
            or self.structured_outputs is not None
            or self.reasoning is not None
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, allowed are {low} to {high}", param=name)


def check_token_ids(params: SamplingParams, vocab: int) -> None:
    """Bound every token id in `params` by the width of the logits.

    Raises:
        RequestError: an id below 0 or not below `vocab`; JAX would drop or clamp it silently.
    """
    fields = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "logit_bias": tuple(params.logit_bias or ()),
    }
    for name, ids in fields.items():
        if len(ids) > vocab:
            raise RequestError(
                f"{name} has {len(ids)} entries, and the model {vocab} tokens", param=name
            )
        check_ids(name, ids, vocab)


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Refuse anything in `ids` that is no token of a model with `vocab` logits."""
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab)):
        return
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise RequestError(
                f"{name} holds {token!r}: a token id is a whole number from 0 to {vocab - 1}",
                param=name,
            )
