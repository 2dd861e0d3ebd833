"""The engine's loop: plan, build, dispatch, and one step later read, commit, tell.

Used by one thread. While the device computes a step, the host plans the next; the tokens of a step
are read when the one after it has been started. Where a row follows a grammar, only its forward
pass has: its mask depends on the tokens that are read meanwhile.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import BucketLadder
from jaxpaged.core.packing import HostBatch
from jaxpaged.core.plan import PlannedRow, StepPlan
from jaxpaged.core.request import Request, TokenEvent
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.engine.explain import Explanations
from jaxpaged.engine.grammar_rows import GrammarRows
from jaxpaged.engine.picture import EnginePicture, take_picture
from jaxpaged.engine.runner import PendingStep, Runner, StepResult
from jaxpaged.engine.stream import Stream
from jaxpaged.engine.verification import verify
from jaxpaged.metrics import EngineLoad, EngineMetrics
from jaxpaged.text.tokenizer import Tokenizer

NOT_FINITE = "the model's logits were not finite for this request"


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    pending: PendingStep


class Engine:
    """Turns requests into token events, one step at a time.

    Args:
        max_in_flight: steps dispatched before the oldest is read; 2 overlaps host and device.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        builder: BatchBuilder,
        ladder: BucketLadder,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        max_in_flight: int,
    ):
        self.runner, self.scheduler, self.metrics = runner, scheduler, metrics
        self._builder, self._ladder, self._tokenizer = builder, ladder, tokenizer
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_InFlight] = deque()
        self._streams: dict[int, Stream] = {}
        self._grammar_rows = GrammarRows()
        self._requests: dict[str, list[Stream]] = {}
        self._next_seq_id = 0
        self._explanations = Explanations(scheduler)
        self.last_step_time = time.monotonic()  # when a step was last read
        self.num_padded_tokens = 0  # since start
        self.on_step: Callable[[StepPlan], None] | None = None  # told of every step that starts

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request: one sequence for each of its n answers.

        Raises:
            RequestError: it could never fit into the page pool.
        """
        streams: list[Stream] = []
        try:
            for choice in range(request.params.n):
                seq = Sequence(
                    self._next_seq_id,
                    request,
                    choice,
                    list(request.prompt_token_ids),
                    len(request.prompt_token_ids),
                    page_hashes=list(request.page_hashes),
                )
                self.scheduler.add(seq)
                self._next_seq_id += 1
                streams.append(Stream.new(seq, self._tokenizer))
        except Exception:
            for stream in streams:
                self.scheduler.abort(stream.seq)
            raise
        self._streams.update((stream.seq.seq_id, stream) for stream in streams)
        self._requests[request.request_id] = streams
        self._explanations.begin(streams)
        for stream in streams:
            self._grammar_rows.add(stream.seq)
        self.metrics.prompt_added(len(request.prompt_token_ids) * len(streams))

    def abort(self, request_id: str) -> list[TokenEvent]:
        """Stop a request; its pages go back at once. Unknown or finished ids are no error.

        Returns the last event of each answer that was open, for a caller who still listens.
        """
        streams, events = self._requests.pop(request_id, []), list[TokenEvent]()
        for stream in streams:
            if stream.seq.state is not SeqState.FINISHED:
                self.scheduler.abort(stream.seq)
                events.append(stream.event((), stream.text(())[0], None))
                self.metrics.finished(stream.life())
            self._streams.pop(stream.seq.seq_id, None)
            self._grammar_rows.forget(stream.seq)
        self._end(streams)
        self.metrics.step_ended(0, self._load())
        return events

    def explanation(self, request_id: str) -> dict[str, Any] | None:
        """Why a request waited and what it got, see `Explanations`; None where nothing is known."""
        return self._explanations.find(request_id, self._requests.get(request_id, ()))

    def picture(self) -> EnginePicture:
        """What every page holds and who is there, now."""
        seqs = [stream.seq for stream in self._streams.values()]
        num_tokens = self.metrics.num_prompt_tokens, self.metrics.num_output_tokens
        return take_picture(seqs, self.scheduler, self._builder, self._load(), num_tokens)

    def step(self) -> list[TokenEvent]:
        """Start the next step if there is one to start, and tell what an earlier one gave."""
        plan = self.scheduler.schedule()
        if plan and self._grammar_rows.is_in(plan):
            return self._step_with_grammars(plan)
        if plan:
            batch = self._build(plan)
            self._in_flight.append(_InFlight(plan, self.runner.dispatch(batch)))
        if self._in_flight and (not plan or len(self._in_flight) >= self._max_in_flight):
            return self._commit(self._in_flight.popleft())
        return []

    def _step_with_grammars(self, plan: StepPlan) -> list[TokenEvent]:
        """Read the tokens before, and make the masks that they lead to, during the forward pass."""
        batch = self._build(plan)
        logits = self.runner.dispatch_forward(batch)
        events: list[TokenEvent] = []
        while self._in_flight:
            events += self._commit(self._in_flight.popleft())
        self._grammar_rows.fill(plan, self._builder.mask_of(batch))
        step = _InFlight(plan, self.runner.dispatch_sample(logits, batch))
        if self._max_in_flight > 1:
            self._in_flight.append(step)
            return events
        return events + self._commit(step)

    def _build(self, plan: StepPlan) -> HostBatch:
        for slot, token_ids, num_prompt_tokens in plan.slot_resets:
            self.runner.set_history(slot, token_ids, num_prompt_tokens)
        if plan.page_moves:
            self.runner.move_pages(plan.page_moves)
        if plan.page_copies:
            self.runner.copy_pages(plan.page_copies)
        bucket = self._ladder.choose(plan)
        batch = self._builder.build(plan, bucket)
        self.num_padded_tokens += bucket.num_tokens - plan.num_tokens
        if self.on_step is not None:
            self.on_step(plan)
        self.metrics.step_started(plan.num_tokens)
        return batch

    def _commit(self, step: _InFlight) -> list[TokenEvent]:
        result, verified = self.runner.read(step.pending), None
        if step.plan.drafts:
            result, verified = verify(step.plan, result)
            self.metrics.drafted(list(verified.token_ids.values()), verified.num_guessed)
        now = time.monotonic()
        rows = step.plan.rows
        live = [
            (i, row, len(row.seq.token_ids))
            for i, row in enumerate(rows)
            if row.seq.state is not SeqState.FINISHED
        ]
        events = self._fail_not_finite(live, result)
        token_ids = result.token_ids.tolist()
        sampled = [token_ids[i] if row.samples else None for i, row in enumerate(rows)]
        if verified is not None:
            sampled = verified.sampled(step.plan, result)
        self.scheduler.commit(step.plan, sampled)
        offsets = _token_offsets(rows)
        gaps: Counter[float | None] = Counter()
        for i, row, num_before in live:
            stream = self._streams.get(row.seq.seq_id)
            if stream is None:
                continue
            stream.take_scores(row, offsets[i], result)
            guessed = () if verified is None else verified.logprobs.get(i, ())[1:]
            event = self._event(stream, i, row, num_before, offsets[i], result, guessed)
            if event is not None:
                if event.token_ids:
                    gaps[self._gap(stream, now)] += 1
                events.append(event)
                if row.seq.state is SeqState.FINISHED:
                    self._forget(stream)
        gaps.pop(None, None)
        for seconds, count in gaps.items():
            assert seconds is not None
            self.metrics.token_gaps(seconds, count)
        self.last_step_time = now
        self.metrics.step_ended(sum(len(event.token_ids) for event in events), self._load())
        return events

    def _fail_not_finite(
        self, live: list[tuple[int, PlannedRow, int]], result: StepResult
    ) -> list[TokenEvent]:
        """End the rows whose logits broke; their pages never reach the prefix cache."""
        if result.is_finite.all():
            return []
        events: list[TokenEvent] = []
        for i, row, _ in live:
            stream = self._streams.get(row.seq.seq_id)
            if stream is None or result.is_finite[i]:
                continue
            self.scheduler.finish(row.seq, "error", None)
            self.metrics.corrupted()
            events.append(stream.event((), "", None, error=NOT_FINITE))
            self._forget(stream)
        return events

    def _event(
        self,
        stream: Stream,
        i: int,
        row: PlannedRow,
        num_before: int,
        offset: int,
        result: StepResult,
        guessed: Seq[float],
    ) -> TokenEvent | None:
        """What this row's step gave its sequence, or None where only part of a prompt was done.

        `guessed` are the logprobs of its tokens after the first.
        """
        seq = stream.seq
        new = tuple(seq.token_ids[num_before:])
        if not new and not stream.is_finished:
            return None
        logprobs = stream.token_logprobs(i, row, offset, result, new[0]) if new else None
        error = self._follow_grammar(stream, new) if seq.request.grammar is not None else None
        if error is not None:
            return stream.event((), "", None, error=error)
        text, stopped_by = stream.text(new)
        if len(new) > 1:
            new = stream.take_guessed(new, guessed, num_before, is_stopped=stopped_by is not None)
        if stopped_by is not None and stream.is_finished:
            seq.finish_reason, seq.stop_reason = "stop", stopped_by
        elif stopped_by is not None:
            self.scheduler.finish(seq, "stop", stopped_by)
        return stream.event(new, text, logprobs)

    def _follow_grammar(self, stream: Stream, new: tuple[int, ...]) -> str | None:
        """End an answer where its grammar does; what went wrong where the grammar was left."""
        seq = stream.seq
        ending = self._grammar_rows.take(seq, new)
        if ending is None:
            return None
        self.scheduler.finish(seq, ending.reason, None)
        seq.finish_reason = ending.reason
        stream.ended_by_grammar = True
        return ending.error

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.seq.seq_id, None)
        self._grammar_rows.forget(stream.seq)
        self.metrics.finished(stream.life())
        streams = self._requests.get(stream.seq.request.request_id)
        if streams and all(other.seq.state is SeqState.FINISHED for other in streams):
            del self._requests[stream.seq.request.request_id]
            self._end(streams)

    def _end(self, streams: list[Stream]) -> None:
        """All answers of a request have ended."""
        if streams:
            self._explanations.end(streams)
            self.metrics.request_ended(len(stream.seq.output_token_ids) for stream in streams)

    def _gap(self, stream: Stream, now: float) -> float | None:
        """Seconds since the sequence's last token, or None for its first, which is told."""
        before, stream.last_token_time = stream.last_token_time, now
        if before is None:
            stream.seq.first_token_time = now
            self.metrics.first_token(now - stream.seq.request.arrival_time)
            return None
        return now - before

    def _load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.cache.num_query_tokens,
            prefix_hits=scheduler.cache.num_hit_tokens,
            num_compilations=self.runner.num_compilations,
        )


def _token_offsets(rows: tuple[PlannedRow, ...]) -> list[int]:
    offsets, total = [], 0
    for row in rows:
        offsets.append(total)
        total += row.q_len
    return offsets
