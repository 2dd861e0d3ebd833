"""What a step gives one sequence: its text, its logprobs, its event."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpaged.core.plan import PlannedRow
from jaxpaged.core.request import TokenEvent, TokenLogprobs
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.engine.runner import StepResult
from jaxpaged.metrics import FinishedSequence
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.tokenizer import Tokenizer


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

    @classmethod
    def new(cls, seq: Sequence, tokenizer: Tokenizer) -> "Stream":
        params = seq.request.params
        detokenizer = None
        if params.detokenize:
            detokenizer = Detokenizer(tokenizer, seq.request.prompt_token_ids, params)
        wants_scores = params.prompt_logprobs is not None and not seq.choice
        return cls(seq, detokenizer, [None] if wants_scores else None)

    @property
    def is_finished(self) -> bool:
        return self.seq.state is SeqState.FINISHED

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
        self, i: int, row: PlannedRow, offset: int, result: StepResult, token_id: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """The logprobs of the token that row `i` sampled, if the request wants any."""
        self.cumulative_logprob += result.logprob_list[i]
        wanted = self.seq.request.params.logprobs
        if wanted is None:
            return None
        is_scored = len(result.ranks) != len(result.token_ids)
        place = offset + row.q_len - 1 if is_scored else i
        return (_logprobs(result, place, token_id, wanted),)

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

    def take_guessed(
        self, new: tuple[int, ...], logprobs: Seq[float], num_before: int, *, is_stopped: bool
    ) -> tuple[int, ...]:
        """Count the tokens after the first of a step; those after a stop string are taken back."""
        if is_stopped and self.detokenizer is not None:
            num_kept = self.detokenizer.num_tokens - (num_before - self.seq.num_prompt_tokens)
            new = new[:num_kept]
            del self.seq.token_ids[num_before + num_kept :]
        self.cumulative_logprob += sum(logprobs[: len(new) - 1])
        return new

    def event(
        self,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprobs, ...] | None,
        error: str | None = None,
    ) -> TokenEvent:
        seq = self.seq
        prompt_logprobs = None
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
        )

    def life(self) -> FinishedSequence:
        """The sequence's whole life, for the metrics."""
        seq, now = self.seq, time.monotonic()
        start, first = seq.first_scheduled_time, seq.first_token_time
        arrival = seq.request.arrival_time
        return FinishedSequence(
            reason=seq.finish_reason or "abort",
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_host_cached_tokens=seq.num_host_cached_tokens,
            num_preemptions=seq.num_preemptions,
            num_output_tokens=len(seq.output_token_ids),
            max_tokens=seq.request.max_tokens,
            e2e_s=now - arrival,
            queue_s=None if start is None else start - arrival,
            prefill_s=None if start is None or first is None else first - start,
            decode_s=None if first is None else now - first,
        )


def _logprobs(result: StepResult, place: int, token_id: int, wanted: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id,
        float(result.target_logprobs[place]),
        int(result.ranks[place]),
        tuple(result.top_ids[place, :wanted].tolist()),
        tuple(result.top_logprobs[place, :wanted].tolist()),
    )
