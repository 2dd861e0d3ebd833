"""Beam search by requests of one token: beams share all pages but the last, which is copied.

A beam's prompt is its parent's tokens and one more, so the prefix cache holds all of it but that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.core.beams import Beam, Beams, BeamSearchParams
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.errors import PromptTooLong, RequestError
from jaxpaged.text.tokenizer import Tokenizer


@dataclass
class BeamSearchSequence:
    """One found sequence. `tokens` and `text` have the prompt in front."""

    tokens: list[int]
    cum_logprob: float
    text: str
    logprobs: list[dict[int, float]]  # of each sampled place, the candidates
    finish_reason: str | None = None  # stop, length
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """What was found after one prompt, best first."""

    sequences: list[BeamSearchSequence]


def begin(inputs: InputProcessor, prompt: Prompt, params: BeamSearchParams) -> Beams:
    """A search that has not taken a step.

    Raises:
        RequestError: the prompt is none, or too long for `max_tokens` more.
    """
    _, token_ids = inputs.encode(prompt)
    check_room(len(token_ids), params, inputs.max_len)
    return Beams(token_ids, params, inputs.tokenizer.eos_token_ids)


def check_room(num_prompt_tokens: int, params: BeamSearchParams, max_model_len: int) -> None:
    """Refuse a search that does not fit the context."""
    if num_prompt_tokens + params.max_tokens > max_model_len:
        raise PromptTooLong(num_prompt_tokens, params.max_tokens, max_model_len)


def step_params(params: BeamSearchParams) -> SamplingParams:
    """How each beam's next token is asked for."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=params.num_candidates,
        copies_begun_page=True,
        output_kind=OutputKind.FINAL_ONLY,
    )


def candidates(output: RequestOutput) -> dict[int, float]:
    """The likeliest next tokens of one beam and their logprobs.

    Raises:
        RequestError: the engine gave the beam up.
    """
    answer = output.outputs[0]
    if not answer.logprobs:
        raise RequestError(output.error or f"a beam ended by {answer.finish_reason}")
    return {token: place.logprob for token, place in answer.logprobs[0].items()}


def found(beams: Beams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """The result of a search that has ended."""
    return BeamSearchOutput([_sequence(beam, beams, tokenizer) for beam in beams.best()])


def answer_token_ids(beam: Beam, beams: Beams) -> Sequence[int]:
    """What follows the prompt, without an end-of-text token that is not to be shown."""
    token_ids = beam.token_ids[len(beams.prompt_token_ids) :]
    is_silent = beam.finish_reason == "stop" and not beams.params.include_stop_str_in_output
    return token_ids[:-1] if is_silent else token_ids


def _sequence(beam: Beam, beams: Beams, tokenizer: Tokenizer) -> BeamSearchSequence:
    shown = [*beams.prompt_token_ids, *answer_token_ids(beam, beams)]
    return BeamSearchSequence(
        list(beam.token_ids),
        beam.cum_logprob,
        tokenizer.decode(shown, True),
        [dict(place) for place in beam.logprobs],
        beam.finish_reason,
    )
