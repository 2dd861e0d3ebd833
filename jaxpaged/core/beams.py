"""Beam search over the likeliest tokens of each step; knows nothing of how they are computed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpaged.core.params import MAX_LOGPROBS
from jaxpaged.errors import RequestError

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0  # beyond it the longest contexts have no finite score


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search; field names and defaults are vLLM's.

    A beam's score is its summed logprob over its length, prompt included and a closing end-of-text
    token not, to the power of `length_penalty`. Logprobs are the model's own: `temperature` is
    taken and changes nothing.

    Raises:
        RequestError: a value outside its range; `param` names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise RequestError(
                f"beam_width is {self.beam_width}, allowed are 1 to {MAX_BEAM_WIDTH}: a step tells "
                f"the {MAX_LOGPROBS} likeliest tokens, and a beam needs two for each beam",
                param="beam_width",
            )
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {self.max_tokens}, a beam search needs 1 or more",
                param="max_tokens",
            )
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty is {self.length_penalty}, allowed are {-MAX_LENGTH_PENALTY:g} to "
                f"{MAX_LENGTH_PENALTY:g}",
                param="length_penalty",
            )

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens each step must tell."""
        return 2 * self.beam_width


@dataclass(frozen=True)
class Beam:
    """One way to go on."""

    token_ids: tuple[int, ...]  # the prompt's too
    cum_logprob: float = 0.0
    logprobs: tuple[Mapping[int, float], ...] = ()  # the candidates of each step
    finish_reason: str | None = None  # stop: its last token is an end-of-text one; length


@dataclass
class Beams:
    """The search after one prompt. Owned by whoever runs its steps."""

    prompt_token_ids: Sequence[int]
    params: BeamSearchParams
    eos_token_ids: Collection[int]
    live: list[Beam] = field(default_factory=list[Beam])  # best first; the next step's prompts
    _ended: list[Beam] = field(default_factory=list[Beam])
    _num_steps: int = 0

    def __post_init__(self):
        self.live = [Beam(tuple(self.prompt_token_ids))]

    @property
    def is_finished(self) -> bool:
        return not self.live or self._num_steps == self.params.max_tokens

    def extend(self, candidates: Sequence[Mapping[int, float]]) -> None:
        """Take a step: for each live beam the logprobs of its likeliest next tokens."""
        self._num_steps += 1
        wider: list[Beam] = []
        for beam, logprobs in zip(self.live, candidates, strict=True):
            for token, logprob in logprobs.items():
                ends = token in self.eos_token_ids and not self.params.ignore_eos
                longer = Beam(
                    (*beam.token_ids, token),
                    beam.cum_logprob + logprob,
                    (*beam.logprobs, logprobs),
                    "stop" if ends else "length",
                )
                (self._ended if ends else wider).append(longer)
        self._ended = sorted(self._ended, key=self._score, reverse=True)[: self.params.beam_width]
        self.live = sorted(wider, key=self._score, reverse=True)[: self.params.beam_width]

    def best(self) -> list[Beam]:
        """The best `beam_width` of all that ended or were stopped by the length, best first."""
        found = sorted([*self._ended, *self.live], key=self._score, reverse=True)
        return found[: self.params.beam_width]

    def _score(self, beam: Beam) -> float:
        length = len(beam.token_ids) - (beam.finish_reason == "stop")
        return beam.cum_logprob / length**self.params.length_penalty
