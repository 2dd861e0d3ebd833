"""Steps on their way: built, started on the device one or several at a time, read in that order."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.core.packing import HostBatch
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.runner import PendingLogits, PendingStep, Runner, StepResult
from jaxpaged.metrics import EngineMetrics


@dataclass(frozen=True)
class _Started:
    """Steps that the device got at once."""

    plans: Seq[StepPlan]
    pending: Seq[PendingStep]
    time: float


class StepPipeline:
    """Between the scheduler's plans and their results.

    Args:
        max_in_flight: dispatches before the oldest is to be read; 2 overlaps host and device.
        num_scheduler_steps: decode steps of one dispatch while nobody waits or drafts. Starting a
            program takes the host longer than a small model takes the device.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        builder: BatchBuilder,
        ladder: BucketLadder,
        metrics: EngineMetrics,
        max_in_flight: int,
        num_scheduler_steps: int,
    ):
        self.runner, self._scheduler, self._metrics = runner, scheduler, metrics
        self._builder, self._ladder = builder, ladder
        self._max_in_flight, self._num_scheduler_steps = max_in_flight, num_scheduler_steps
        self._started: deque[_Started] = deque()
        self.last_step_time = time.monotonic()  # when a step was last read
        self.num_padded_tokens = 0  # since start
        self.on_step: Callable[[StepPlan], None] | None = None  # told of every step that starts

    def __bool__(self) -> bool:
        """Whether a step is to be read."""
        return bool(self._started)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step is to be read before another one starts."""
        return len(self._started) >= self._max_in_flight

    def start(self, plan: StepPlan) -> None:
        """Dispatch a step, and where a chain of steps may go at once those that follow it."""
        bucket = self._ladder.choose(plan)
        scheduler = self._scheduler
        may_chain = self._num_scheduler_steps > 1 and bucket.kind == "decode"
        if may_chain and not scheduler.num_waiting and not scheduler.is_drafting:
            return self._start_chain(plan, self._ladder.chained(bucket))
        return self._dispatch([plan], [self._build(plan, bucket)])

    def start_forward(self, plan: StepPlan) -> tuple[HostBatch, PendingLogits]:
        """The first half of a step whose masks come later; `start_sampling` must follow."""
        batch = self._build(plan, self._ladder.choose(plan))
        return batch, self.runner.dispatch_forward(batch)

    def start_sampling(self, plan: StepPlan, batch: HostBatch, logits: PendingLogits) -> None:
        self._keep([plan], [self.runner.dispatch_sample(logits, batch)])

    def read_oldest(self) -> Iterator[tuple[StepPlan, StepResult, float]]:
        """Wait for what was dispatched first: each of its steps, its result, when it ended.

        Steps of one dispatch come back together, and are taken to have lasted the same.
        """
        started = self._started.popleft()
        begun = max(self.last_step_time, started.time)
        for i, (plan, pending) in enumerate(zip(started.plans, started.pending, strict=True), 1):
            result = self.runner.read(pending)
            self.last_step_time = time.monotonic()
            yield plan, result, begun + (self.last_step_time - begun) * i / len(started.plans)

    def _start_chain(self, plan: StepPlan, bucket: Bucket) -> None:
        """Dispatch a decode step with those that follow it, as far as `bucket` holds them."""
        chain, batches = [plan], [self._build(plan, bucket)]
        while len(chain) < self._num_scheduler_steps:
            plan = self._scheduler.schedule()
            if not plan:
                break
            own = self._ladder.choose(plan)
            is_alike = (own.kind, own.sampler) == (bucket.kind, bucket.sampler)
            fits = is_alike and own.num_seqs <= bucket.num_seqs
            if plan.changes_before or self._scheduler.num_waiting or not fits:
                self._dispatch(chain, batches)
                return self._dispatch([plan], [self._build(plan, own)])
            chain.append(plan)
            batches.append(self._build(plan, bucket))
        return self._dispatch(chain, batches)

    def _dispatch(self, plans: Seq[StepPlan], batches: Seq[HostBatch]) -> None:
        if len(plans) == self._num_scheduler_steps > 1:
            self._keep(plans, self.runner.dispatch_chain(batches))
        else:
            self._keep(plans, [self.runner.dispatch(batch) for batch in batches])

    def _keep(self, plans: Seq[StepPlan], pending: Seq[PendingStep]) -> None:
        self._started.append(_Started(plans, pending, time.monotonic()))

    def _build(self, plan: StepPlan, bucket: Bucket) -> HostBatch:
        for slot, token_ids, num_prompt_tokens in plan.slot_resets:
            self.runner.set_history(slot, token_ids, num_prompt_tokens)
        if plan.page_moves:
            self.runner.move_pages(plan.page_moves)
        if plan.page_copies:
            self.runner.copy_pages(plan)
        batch = self._builder.build(plan, bucket)
        self.num_padded_tokens += bucket.num_tokens - plan.num_tokens
        if self.on_step is not None:
            self.on_step(plan)
        self._metrics.step_started(plan.num_tokens)
        return batch
