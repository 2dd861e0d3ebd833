"""The loop that embeds: calls of many texts in, one array of results out."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpaged.arrays import Params
from jaxpaged.core.pooling import HostStep, TextPacker
from jaxpaged.core.text_queue import Text, TextQueue
from jaxpaged.engine.pooling.programs import PoolingPrograms
from jaxpaged.errors import GenerationFailed
from jaxpaged.metrics import EngineLoad, EngineMetrics, FinishedSequence

MAX_IN_FLIGHT = 2  # so that a step runs while the one before it is read


@dataclass(eq=False)
class PoolingCall:
    """Texts of one caller and what became of them. Owned by the engine."""

    call_id: int
    texts: Sequence[Text]
    results: NDArray[np.float32]  # [texts, size]
    num_left: int
    arrival_time: float = field(default_factory=time.monotonic)
    first_time: float = 0.0  # when the first of its texts was in a step
    error: GenerationFailed | None = None


class PoolingEngine:
    """Used by one thread."""

    def __init__(
        self,
        programs: PoolingPrograms,
        params: Params,
        state: Any,
        packer: TextPacker,
        metrics: EngineMetrics,
        size: int,
    ):
        self.programs, self.metrics = programs, metrics
        self._params, self._state, self._packer, self._size = params, state, packer, size
        self._queue, self._planned = TextQueue(), deque[HostStep]()
        self._in_flight: deque[tuple[HostStep, Any]] = deque()
        self._calls: dict[int, PoolingCall] = {}
        self._last_step_time = time.monotonic()

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._planned or self._in_flight)

    @property
    def last_progress_time(self) -> float:
        """When a step was last read or a program compiled, in seconds of the monotonic clock."""
        return max(self._last_step_time, self.programs.clock.last_progress_time)

    @property
    def num_waiting(self) -> int:
        """Texts that no step has taken yet."""
        return len(self._queue)

    @property
    def num_live(self) -> int:
        """Those of them that are not in the background."""
        return self._queue.num_live

    def add(
        self,
        call_id: int,
        token_ids: Sequence[Sequence[int]],
        seconds: Sequence[int],
        *,
        is_background: bool = False,
    ) -> None:
        """Queue a call; `seconds` says where in each text the second one of a pair begins."""
        texts = [
            Text(call_id, index, ids, second, is_background)
            for index, (ids, second) in enumerate(zip(token_ids, seconds, strict=True))
        ]
        results = np.zeros((len(texts), self._size), np.float32)
        self._calls[call_id] = PoolingCall(call_id, texts, results, len(texts))
        self._queue.add(texts)

    def drop(self, call_id: int) -> None:
        """Forget a call; what of it is in a step already is computed for nobody."""
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._queue.drop(call_id)
            self._note_finished(call, "abort", call.num_left)

    def step(self) -> list[PoolingCall]:
        """Start steps until enough are in flight, read the oldest; calls that it completed."""
        while len(self._in_flight) < MAX_IN_FLIGHT and self._start():
            pass
        done = self._read(*self._in_flight.popleft()) if self._in_flight else []
        self._last_step_time = time.monotonic()
        num_running = sum(len(step.texts) for step, _ in self._in_flight)
        num_compilations = self.programs.num_compilations
        load = EngineLoad(num_running, len(self._queue), 0.0, 0, 0, 0, num_compilations)
        self.metrics.step_ended(0, load)
        return done

    def close(self) -> None:
        """Let go of the weights."""
        self._params = self._state = None

    def _start(self) -> bool:
        if not self._planned:
            self._planned.extend(self._packer.steps(self._queue))
        if not self._planned:
            return False
        step, now = self._planned.popleft(), time.monotonic()
        program = self.programs.get(step.bucket)
        self._state, results = program(self._params, self._state, step.packed)
        results.copy_to_host_async()
        self._in_flight.append((step, results))
        self.metrics.step_started(step.num_tokens)
        self.metrics.prompt_added(step.num_tokens)
        for text in step.texts:
            call = self._calls.get(text.call_id)
            if call is not None:
                call.first_time = call.first_time or now
        return True

    def _read(self, step: HostStep, results: Any) -> list[PoolingCall]:
        if not step.texts:
            return []
        rows = np.asarray(results)[: len(step.texts)]
        is_finite = np.isfinite(rows).all(axis=1)
        done: list[PoolingCall] = []
        for text, row, is_good in zip(step.texts, rows, is_finite, strict=True):
            call = self._calls.get(text.call_id)
            if call is None:
                continue  # its caller has left
            call.results[text.index] = row
            call.num_left -= 1
            if not is_good:
                self.metrics.corrupted()
                call.error = GenerationFailed(
                    f"the model gave numbers that are not finite for text {text.index}"
                )
            if not call.num_left:
                del self._calls[call.call_id]
                reason = "stop" if call.error is None else "error"
                self._note_finished(call, reason, len(call.texts))
                done.append(call)
        return done

    def _note_finished(self, call: PoolingCall, reason: str, num_texts: int) -> None:
        now = time.monotonic()
        queued = call.first_time - call.arrival_time if call.first_time else None
        for text in call.texts[:num_texts]:
            self.metrics.finished(
                FinishedSequence(
                    reason=reason,
                    num_prompt_tokens=len(text.token_ids),
                    num_cached_tokens=0,
                    num_preemptions=0,
                    num_output_tokens=0,
                    max_tokens=0,
                    e2e_s=now - call.arrival_time,
                    queue_s=queued,
                    prefill_s=None,
                    decode_s=None,
                )
            )
