"""What a step gives one sequence: its text, its logprobs, its event."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpaged.core.params import OutputKind
from jaxpaged.core.plan import PlannedRow
from jaxpaged.core.repetition import RepetitionWatch
from jaxpaged.core.request import AnswerTimes, TokenEvent, TokenLogprobs
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.engine.runner import StepResult
from jaxpaged.metrics import FinishedSequence
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.tokenizer import Tokenizer

PIECE = 32  # tokens of an event to somebody who waits for the end


@dataclass(eq=False, slots=True)
class Stream:
    """What the engine keeps beside a sequence. Owned by the engine."""

    seq: Sequence
    detokenizer: Detokenizer | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    cumulative_logprob: float = 0.0
    told_prompt_logprobs: bool = False
    last_token_time: float | None = None  # seconds, monotonic
    ended_by_grammar: bool = False  # whose last token is text like any other
    num_told: int = 0  # tokens of the sequence that events have told, and the prompt's
    due: int = 0  # tokens of the sequence with which the next event is due, if it does not end
    repetition: RepetitionWatch | None = None
    holds: bool = False  # its caller waits for the end: tokens are told in pieces

    @classmethod
    def new(cls, seq: Sequence, tokenizer: Tokenizer) -> "Stream":
        params = seq.request.params
        detokenizer = None
        if params.detokenize:
            detokenizer = Detokenizer(tokenizer, seq.request.prompt_token_ids, params)
        wants_scores = params.prompt_logprobs is not None and not seq.choice
        stream = cls(seq, detokenizer, [None] if wants_scores else None)
        stream.num_told = seq.num_prompt_tokens
        looks_for = params.repetition_detection
        if looks_for is not None and looks_for.max_pattern_size:
            stream.repetition = RepetitionWatch(looks_for)
        is_looked_at = params.logprobs is not None or params.stop or params.reasoning
        is_looked_at = is_looked_at or stream.repetition
        stream.holds = params.output_kind is OutputKind.FINAL_ONLY and not (
            wants_scores or is_looked_at or seq.request.grammar
        )
        return stream

    @property
    def is_finished(self) -> bool:
        return self.seq.state is SeqState.FINISHED

    def untold(self) -> tuple[int, ...]:
        """The tokens since the last event."""
        return tuple(self.seq.token_ids[self.num_told :])

    def take_scores(self, row: PlannedRow, offset: int, result: StepResult) -> None:
        """Keep the scores of a chunk's prompt tokens: logits at a place score the next token."""
        if self.prompt_logprobs is None:
            return
        wanted = self.seq.request.params.prompt_logprobs or 0
        for place in range(row.q_len):
            position = row.start + place + 1
            if position == len(self.prompt_logprobs) and position < self.seq.num_prompt_tokens:
                token = self.seq.token_ids[position]
                self.prompt_logprobs.append(_logprobs(result, offset + place, token, wanted))

    def token_logprobs(
        self, place: int, result: StepResult, token_id: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """The logprobs of the token sampled at `place`, if the request wants any."""
        wanted = self.seq.request.params.logprobs
        return None if wanted is None else (_logprobs(result, place, token_id, wanted),)

    def text(self, new: tuple[int, ...]) -> tuple[str, str | None]:
        """The text that new tokens make certain, and the stop string that they complete."""
        if self.detokenizer is None:
            return "", None
        ended_by_token = self.is_finished and self.seq.finish_reason == "stop"
        ended_by_token = ended_by_token and not self.ended_by_grammar
        is_silent = ended_by_token and not self.seq.request.params.include_stop_str_in_output
        text, stopped_by = self.detokenizer.push(new, silent_last=is_silent and bool(new))
        if stopped_by is None and self.is_finished:
            text += self.detokenizer.flush()
        return text, stopped_by

    def num_until_stop(self) -> int:
        """New tokens up to the one that completed a stop string."""
        assert self.detokenizer is not None
        return self.detokenizer.num_tokens - (self.num_told - self.seq.num_prompt_tokens)

    def until_repetition(
        self, new: tuple[int, ...], guessed: Seq[float]
    ) -> tuple[tuple[int, ...], Seq[float]] | None:
        """The new tokens up to the one with which the answer repeats itself, and what is guessed of
        them; None where it does not, or has ended with that very token.
        """
        assert self.repetition is not None
        before = self.num_told - self.seq.num_prompt_tokens
        for num, token_id in enumerate(new, 1):
            is_long = before + num >= self.seq.request.params.min_tokens
            if self.repetition.repeats(token_id) and is_long:
                if num < len(new):
                    return self.cut(new, guessed, num), guessed[: num - 1]
                return None if self.is_finished else (new, guessed)
        return None

    def cut(self, new: tuple[int, ...], guessed: Seq[float], num_kept: int) -> tuple[int, ...]:
        """Take back the guessed tokens after the first `num_kept`."""
        del self.seq.token_ids[self.num_told + num_kept :]
        self.cumulative_logprob -= sum(guessed[max(num_kept - 1, 0) :])
        return new[:num_kept]

    def ended(self, error: str | None = None) -> TokenEvent:
        """The last event of an answer that ended between steps."""
        new = self.untold()
        return self.event(new, self.text(new)[0], None, error)

    def event(
        self,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprobs, ...] | None,
        error: str | None = None,
    ) -> TokenEvent:
        seq, prompt_logprobs = self.seq, None
        self.num_told += len(token_ids)
        if self.holds:  # where pieces end differs, so that not all end in the same step
            self.due = self.num_told + PIECE - (self.num_told + seq.seq_id) % PIECE
        if self.prompt_logprobs is not None and not self.told_prompt_logprobs:
            missing = seq.num_prompt_tokens - len(self.prompt_logprobs)  # of one that was aborted
            prompt_logprobs = (*self.prompt_logprobs, *[None] * missing)
            self.told_prompt_logprobs = True
        return TokenEvent(
            seq.request.request_id,
            seq.choice,
            token_ids,
            text,
            logprobs,
            prompt_logprobs,
            seq.finish_reason,
            seq.stop_reason,
            seq.num_cached_tokens,
            self.cumulative_logprob,
            error,
            None if seq.finish_reason is None else self.times(),
        )

    def times(self) -> AnswerTimes:
        """How long its parts took, up to the last token that was read."""
        seq, last = self.seq, self.last_token_time
        start, first = seq.first_scheduled_time, seq.first_token_time
        return AnswerTimes(
            None if start is None else start - seq.request.arrival_time,
            None if start is None or first is None else first - start,
            None if first is None or last is None else last - first,
        )

    def life(self) -> FinishedSequence:
        """The sequence's whole life, for the metrics."""
        seq, times = self.seq, self.times()
        return FinishedSequence(
            reason=seq.finish_reason or "abort",
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_host_cached_tokens=seq.num_host_cached_tokens,
            num_preemptions=seq.num_preemptions,
            num_output_tokens=len(seq.output_token_ids),
            max_tokens=seq.request.max_tokens,
            e2e_s=time.monotonic() - seq.request.arrival_time,
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
        )


def _logprobs(result: StepResult, place: int, token_id: int, wanted: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id,
        float(result.target_logprobs[place]),
        int(result.ranks[place]),
        tuple(result.top_ids[place, :wanted].tolist()),
        tuple(result.top_logprobs[place, :wanted].tolist()),
    )
