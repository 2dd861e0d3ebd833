"""The engine's loop: plan, build, dispatch, and one step later read, commit, tell.

Used by one thread. While the device computes a step, the host plans the next; the tokens of a step
are read when the one after it has been started. Where a row follows a grammar, only its forward
pass has: its mask depends on the tokens that are read meanwhile.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import BucketLadder
from jaxpaged.core.logit_edits import excluding
from jaxpaged.core.plan import RowColumns, StepPlan
from jaxpaged.core.repetition import FOUND
from jaxpaged.core.request import Request, TokenEvent
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.engine.explain import Explanations
from jaxpaged.engine.grammar_rows import GrammarRows
from jaxpaged.engine.picture import EnginePicture, take_picture
from jaxpaged.engine.pipeline import StepPipeline
from jaxpaged.engine.runner import Runner, StepResult
from jaxpaged.engine.stream import Stream
from jaxpaged.engine.verification import verify
from jaxpaged.metrics import EngineLoad, EngineMetrics
from jaxpaged.text.tokenizer import Tokenizer

NOT_FINITE = "the model's logits were not finite for this request"


class Engine:
    """Turns requests into token events, one step at a time.

    Args:
        max_in_flight, num_scheduler_steps: see `StepPipeline`.
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
        num_scheduler_steps: int = 1,
    ):
        self.scheduler, self.metrics = scheduler, metrics
        self._builder, self._tokenizer = builder, tokenizer
        self.steps = StepPipeline(
            runner, scheduler, builder, ladder, metrics, max_in_flight, num_scheduler_steps
        )
        self._streams: dict[int, Stream] = {}
        self._scored: set[int] = set()  # seq_ids of those that want prompt logprobs
        self._grammar_rows = GrammarRows(tokenizer)
        self._requests: dict[str, list[Stream]] = {}
        self._next_seq_id, self._last_read = 0, 0.0
        self._explanations = Explanations(scheduler)

    @property
    def runner(self) -> Runner:
        return self.steps.runner

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.steps)

    @property
    def last_progress_time(self) -> float:
        """When a step was last read or a program compiled, in seconds of the monotonic clock."""
        return max(self.steps.last_step_time, self.runner.last_compile_time)

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
            if stream.prompt_logprobs is not None:
                self._scored.add(stream.seq.seq_id)
        self.metrics.prompt_added(len(request.prompt_token_ids) * len(streams))

    def abort(self, request_id: str) -> list[TokenEvent]:
        """Stop a request; its pages go back at once. Unknown or finished ids are no error.

        Returns the last event of each answer that was open, for a caller who still listens.
        """
        streams, events = self._requests.pop(request_id, []), list[TokenEvent]()
        for stream in streams:
            if stream.seq.state is not SeqState.FINISHED:
                self.scheduler.abort(stream.seq)
                events.append(stream.ended())
                self.metrics.finished(stream.life())
            self._leave(stream)
        self._end(streams)
        self.publish_load()
        return events

    def publish_load(self) -> None:
        """Have the metrics tell what runs, waits and holds pages now."""
        self.metrics.step_ended(0, self._load())

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
            self.steps.start(plan)
        elif self.steps:
            return self._read_oldest()
        events: list[TokenEvent] = []
        while self.steps.is_full:
            events += self._read_oldest()
        return events

    def _step_with_grammars(self, plan: StepPlan) -> list[TokenEvent]:
        """Read the tokens before, and make the masks that they lead to, during the forward pass."""
        batch, logits = self.steps.start_forward(plan)
        events: list[TokenEvent] = []
        while self.steps and self._grammar_rows.wait_for_tokens(plan):
            events += self._read_oldest()
        self._grammar_rows.fill(plan, self._builder.banned_of(batch))
        self.steps.start_sampling(plan, batch, logits)
        return events + self._read_oldest() if self.steps.is_full else events

    def _read_oldest(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for plan, result, ended in self.steps.read_oldest():
            events += self._commit(plan, result, ended)
        return events

    def _commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        rows, verified, nums_before = plan.columns, None, list[int]()
        if plan.drafts:
            result, verified = verify(plan, result)
            nums_before = [len(seq.token_ids) for seq in rows.seqs]
            self.metrics.drafted(list(verified.token_ids.values()), verified.num_guessed)
        events = [] if result.is_good else self._fail_rows(rows, result)
        if self._scored:
            self._take_scores(plan, result)
        is_scored = len(result.ranks) > len(result.token_ids)
        places = rows.last_places() if is_scored else range(len(rows))
        sampled = verified.sampled(plan, result) if verified else rows.kept(result.token_ids)
        streams, logprobs, samples = self._streams, result.logprob_list, rows.samples
        before, num_new, guessed = list[float](), 0, list[float]()
        seconds, self._last_read = now - self._last_read, now
        for i in self.scheduler.commit(plan, sampled, seconds):
            seq = rows.seqs[i]
            stream, num_tokens = streams[seq.seq_id], len(seq.token_ids)
            if verified:
                guessed = verified.after_first(i, num_tokens - nums_before[i])
                stream.cumulative_logprob += sum(guessed)
            if samples[i]:
                num_new += 1
                stream.cumulative_logprob += logprobs[i]
                if stream.last_token_time is None:
                    self._first_token(seq, now)
                else:
                    before.append(stream.last_token_time)
                stream.last_token_time = now
            if num_tokens >= stream.due or stream.is_finished:
                events.append(self._event(stream, places[i], result, guessed))
                if stream.is_finished:
                    self._forget(stream)
            if guessed:
                num_new += len(seq.token_ids) - nums_before[i] - 1
        self._note_gaps(before, now)
        self.metrics.step_ended(num_new, self._load())
        return events

    def _note_gaps(self, before: list[float], now: float) -> None:
        for time, count in Counter(before).items():
            self.metrics.token_gaps(now - time, count)

    def _first_token(self, seq: Sequence, now: float) -> None:
        seq.first_token_time = now
        self.metrics.first_token(now - seq.request.arrival_time)

    def _fail_rows(self, rows: RowColumns, result: StepResult) -> list[TokenEvent]:
        """End the rows whose logits broke, and those in which no token was left to sample; their
        pages never reach the prefix cache.
        """
        events: list[TokenEvent] = []
        failed = ~result.is_finite[: len(rows)]
        if result.is_banned is not None:
            failed |= result.is_banned[: len(rows)] & np.asarray(rows.samples)
        for i in np.flatnonzero(failed).tolist():
            stream = self._streams.get(rows.seqs[i].seq_id)
            if stream is None:
                continue
            at_fault, error = None, NOT_FINITE
            if result.is_finite[i]:
                names = excluding(stream.seq.request)
                at_fault, error = names[0], f"{' and '.join(names)} leave no token to sample"
            else:
                self.metrics.corrupted()
            self.scheduler.finish(stream.seq, "error", at_fault)
            events.append(stream.ended(error))
            self._forget(stream)
        return events

    def _take_scores(self, plan: StepPlan, result: StepResult) -> None:
        first = 0
        for row in plan.rows:
            stream = self._streams.get(row.seq.seq_id)
            if stream is not None:
                stream.take_scores(row, first, result)
            first += row.q_len

    def _event(
        self, stream: Stream, place: int, result: StepResult, guessed: Seq[float]
    ) -> TokenEvent:
        """What a sequence got since its last event.

        Its newest token but the guessed ones has its logprobs at `place`.
        """
        seq, new = stream.seq, stream.untold()
        logprobs = stream.token_logprobs(place, result, new[0]) if new else None
        is_followed = seq.seq_id in self._grammar_rows.followed
        error = self._follow_grammar(stream, new) if is_followed else None
        if error is not None:
            return stream.event((), "", None, error=error)
        if stream.repetition is not None and (kept := stream.until_repetition(new, guessed)):
            new, guessed = kept
            self._finish(seq, "repetition", FOUND)
        text, stopped_by = stream.text(new)
        if stopped_by is not None:
            new = stream.cut(new, guessed, stream.num_until_stop()) if guessed else new
            self._finish(seq, "stop", stopped_by)
        return stream.event(new, text, logprobs)

    def _finish(self, seq: Sequence, reason: str, stop_reason: str) -> None:
        """End a sequence, also one that tokens behind the end have finished."""
        if seq.state is not SeqState.FINISHED:
            self.scheduler.finish(seq, reason, stop_reason)
        seq.finish_reason, seq.stop_reason = reason, stop_reason

    def _follow_grammar(self, stream: Stream, new: tuple[int, ...]) -> str | None:
        """End an answer where its grammar does; what went wrong where the grammar was left."""
        seq = stream.seq
        ending = self._grammar_rows.take(seq, new)
        if ending is None:
            return None
        at_fault = None if ending.error is None else "structured_outputs"
        self.scheduler.finish(seq, ending.reason, at_fault)
        seq.finish_reason = ending.reason
        stream.ended_by_grammar = True
        return ending.error

    def _forget(self, stream: Stream) -> None:
        self._leave(stream)
        self.metrics.finished(stream.life())
        streams = self._requests.get(stream.seq.request.request_id)
        if streams and all(other.seq.state is SeqState.FINISHED for other in streams):
            del self._requests[stream.seq.request.request_id]
            self._end(streams)

    def _leave(self, stream: Stream) -> None:
        self._streams.pop(stream.seq.seq_id, None)
        self._scored.discard(stream.seq.seq_id)
        self._grammar_rows.forget(stream.seq)

    def _end(self, streams: list[Stream]) -> None:
        """All answers of a request have ended."""
        if streams:
            self._explanations.end(streams)
            self.metrics.request_ended(len(stream.seq.output_token_ids) for stream in streams)

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
