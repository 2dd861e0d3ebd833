"""From token events to RequestOutput: whole so far, or only what is new."""

import time
from dataclasses import replace

from jaxpaged.core.params import OutputKind
from jaxpaged.core.request import Request, TokenEvent, TokenLogprobs
from jaxpaged.engine.outputs import (
    CompletionOutput,
    Logprob,
    PlaceLogprobs,
    RequestMetrics,
    RequestOutput,
)
from jaxpaged.text.tokenizer import Tokenizer


class Assembler:
    """Collects one request's events. `is_finished` once all of its n answers have ended."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer):
        self.request = request
        self._prompt, self._tokenizer = prompt, tokenizer
        self._prompt_logprobs: list[PlaceLogprobs | None] | None = None
        self._answers = [self._empty(choice) for choice in range(request.params.n)]
        self._num_cached_tokens = 0
        self._num_open = request.params.n
        self._metrics = RequestMetrics(request.arrival_time)
        self._error: str | None = None

    @property
    def is_finished(self) -> bool:
        return not self._num_open

    def add(self, event: TokenEvent) -> CompletionOutput:
        """Take an event in; returns the part that it adds."""
        self._note(event)
        logprobs = None if event.logprobs is None else [self._place(p) for p in event.logprobs]
        part = CompletionOutput(
            event.choice,
            event.text,
            list(event.token_ids),
            event.cumulative_logprob,
            logprobs,
            event.finish_reason,
            event.stop_reason,
        )
        join(self._answers[event.choice], part)
        return part

    def take(self, event: TokenEvent) -> None:
        """Take an event in where only the whole will be asked for: cheaper than `add`."""
        if event.logprobs is not None:
            self.add(event)
            return
        self._note(event)
        answer = self._answers[event.choice]
        answer.text += event.text
        answer.token_ids += event.token_ids
        answer.cumulative_logprob = event.cumulative_logprob
        answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason

    def _note(self, event: TokenEvent) -> None:
        now, metrics = time.monotonic(), self._metrics
        if event.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        if event.finish_reason is not None:
            self._num_open -= 1
            metrics.times = event.times
        if event.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = event.num_cached_tokens
        if event.error:
            self._error = event.error
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = [p and self._place(p) for p in event.prompt_logprobs]

    def whole(self) -> RequestOutput:
        """Everything so far."""
        return self._output(
            [replace(answer, token_ids=list(answer.token_ids)) for answer in self._answers]
        )

    def delta(self, parts: list[CompletionOutput]) -> RequestOutput:
        """What `parts` add, joined by answer."""
        joined: dict[int, CompletionOutput] = {}
        for part in parts:
            before = joined.get(part.index)
            if before is None:
                before = replace(part, token_ids=[], text="", logprobs=None)
            joined[part.index] = join(before, part)
        return self._output(list(joined.values()))

    def output(self, parts: list[CompletionOutput]) -> RequestOutput | None:
        """What the caller's `output_kind` wants now; None while FINAL_ONLY waits for the end."""
        kind = self.request.params.output_kind
        if kind is OutputKind.DELTA:
            return self.delta(parts)
        return self.whole() if kind is OutputKind.CUMULATIVE or self.is_finished else None

    def _output(self, answers: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request.request_id,
            self._prompt,
            self.request.prompt_token_ids,
            answers,
            self.is_finished,
            self._prompt_logprobs,
            self._num_cached_tokens,
            self._metrics,
            self._error,
        )

    def _empty(self, choice: int) -> CompletionOutput:
        wants_logprobs = self.request.params.logprobs is not None
        return CompletionOutput(choice, "", [], 0.0, [] if wants_logprobs else None)

    def _place(self, place: TokenLogprobs) -> PlaceLogprobs:
        entries = {place.token_id: self._logprob(place.token_id, place.logprob, place.rank)}
        tops = zip(place.top_ids, place.top_logprobs, strict=True)
        are_ranked = self.request.params.logprob_token_ids is None
        for rank, (token_id, logprob) in enumerate(tops, 1):
            named = self._logprob(token_id, logprob, rank if are_ranked else None)
            entries.setdefault(token_id, named)
        return entries

    def _logprob(self, token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, self._tokenizer.decode([token_id], skip_special_tokens=False))


def join(before: CompletionOutput, part: CompletionOutput) -> CompletionOutput:
    """Append `part` to `before`, a part of the same answer, which is changed and returned."""
    before.text += part.text
    before.token_ids.extend(part.token_ids)
    before.cumulative_logprob = part.cumulative_logprob
    before.finish_reason, before.stop_reason = part.finish_reason, part.stop_reason
    if part.logprobs is not None:
        before.logprobs = before.logprobs if before.logprobs is not None else []
        before.logprobs.extend(part.logprobs)
    return before
