"""What a client asked, and what the engine tells about it."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from jaxpaged.core.params import SamplingParams


class RequestGrammar(Protocol):
    """A grammar as `jaxpaged.text.grammar` compiles it."""

    @property
    def shortest(self) -> int | None: ...


class Pin(NamedTuple):
    """Asks that a prompt's full pages stay in the cache."""

    prefix_id: str
    share: float = 1.0  # of the pages that may be pinned, what those of its key may hold together


@dataclass(frozen=True)
class Request:
    """One prompt to continue, unchanging. Ids are bounded and lengths checked before it is made."""

    request_id: str  # the engine's own, unique; a client's id is only echoed
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # most tokens to sample, once the context is known
    seed: int  # the client's, or one from the engine's counter; 64 bits
    arrival_time: float  # seconds, monotonic
    eos_token_ids: frozenset[int]
    priority: int = 0
    cache_salt: str = ""  # only requests of the same salt and adapter share cached pages
    adapter_id: str = ""
    key_name: str = ""  # of the API key that it came with; never the key itself
    banned_ids: tuple[int, ...] = ()  # single-token bad words
    banned_runs: tuple[tuple[int, ...], ...] = ()  # bad words of several tokens
    grammar: RequestGrammar | None = None  # what its answers must look like
    # made outside the engine's thread, or empty: hashes of the prompt's full pages, and its tokens
    page_hashes: tuple[bytes, ...] = ()
    prompt_bytes: bytes = b""
    pin: Pin | None = None  # of a request that warms a prefix

    @cached_property
    def cache_root(self) -> tuple[str, str]:
        """Where its chain of cached pages begins."""
        return self.cache_salt, self.adapter_id

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that may end an answer."""
        params = self.params
        stop_ids = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return stop_ids.union(params.stop_token_ids) if params.stop_token_ids else stop_ids

    @cached_property
    def has_known_length(self) -> bool:
        """Whether nothing can end an answer before its `max_tokens`, or the context."""
        params = self.params
        may_stop = self.stop_ids or params.stop or params.repetition_detection
        may_stop = may_stop or self.grammar is not None
        return not may_stop or self.max_tokens <= 1

    @cached_property
    def copies_begun_page(self) -> bool:
        """Its sequences take over a page that is not full, by copy, from one that computed it."""
        return self.params.copies_begun_page or self.params.n > 1


@dataclass(frozen=True)
class TokenLogprobs:
    """The logprobs of one place: the token there, and the likeliest ones, best first."""

    token_id: int
    logprob: float
    rank: int  # of `token_id`, from 1
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class AnswerTimes(NamedTuple):
    """How long the parts of an answer took, in seconds; None for one that it did not come to."""

    queue_s: float | None  # from arrival to the first step
    prefill_s: float | None  # from there to the first token
    decode_s: float | None  # from the first token to the last


class TokenEvent(NamedTuple):
    """What one step added to one sequence of a request. A tuple: one is made for every token."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str  # new and final: neither a partial character nor the beginning of a stop string
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None  # once, with the first event
    finish_reason: str | None  # stop, length, repetition, abort, error
    stop_reason: int | str | None  # token id or string that stopped it, parameter that broke it
    num_cached_tokens: int
    cumulative_logprob: float
    error: str | None = None
    times: AnswerTimes | None = None  # with the last event of an answer
