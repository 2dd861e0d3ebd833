"""What became of a request: why it waited, what each step gave it, what the prefix cache held."""

import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState
from jaxpaged.core.trace import Trace
from jaxpaged.engine.stream import Stream

MAX_KEPT = 256  # finished requests


class Explanations:
    """Of running requests, and of the last ones that had asked for it. Written by one thread."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def begin(self, streams: Seq[Stream]) -> None:
        """Trace a request if it asked for it."""
        if streams[0].seq.request.params.explain:
            for stream in streams:
                self._scheduler.traces[stream.seq.seq_id] = Trace(stream.seq)

    def end(self, streams: Seq[Stream]) -> None:
        """Keep what is known of a request that has ended, if it asked for it."""
        if not streams[0].seq.request.params.explain:
            return
        self._kept[streams[0].seq.request.request_id] = self._explain(streams)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        for stream in streams:
            self._scheduler.traces.pop(stream.seq.seq_id, None)

    def find(self, request_id: str, streams: Seq[Stream]) -> dict[str, Any] | None:
        """An open request's explanation, or a kept one. May be called by another thread."""
        return self._explain(streams) if streams else self._kept.get(request_id)

    def _explain(self, streams: Seq[Stream]) -> dict[str, Any]:
        request = streams[0].seq.request
        return {
            "request_id": request.request_id,
            "key_name": request.key_name,
            "priority": request.priority,
            "prompt_tokens": len(request.prompt_token_ids),
            "answers": [self._answer(stream) for stream in streams],
        }

    def _answer(self, stream: Stream) -> dict[str, Any]:
        seq, waits_for = stream.seq, None
        if seq.state not in (SeqState.RUNNING, SeqState.FINISHED):
            waits_for = self._scheduler.wait_cause
        answer: dict[str, Any] = {
            "index": seq.choice,
            "state": seq.state.value,
            "finish_reason": seq.finish_reason,
            "waits_for": waits_for,
            "cached_tokens": seq.num_cached_tokens,
            "host_cached_tokens": seq.num_host_cached_tokens,
            "completion_tokens": len(seq.token_ids) - seq.num_prompt_tokens,
            "preemptions": seq.num_preemptions,
            "seconds": _seconds(stream),
        }
        trace = self._scheduler.traces.get(seq.seq_id)
        if trace is not None:
            answer |= {
                "plans_waited": dict(trace.waits),
                "tokens_per_step": list(trace.q_lens),
                "first_missed_page": trace.first_missed_page,
                "why_missed": trace.why_missed,
            }
        return answer


def _seconds(stream: Stream) -> dict[str, float | None]:
    """Time split; None for what has not begun."""
    seq, now = stream.seq, time.monotonic()
    arrival, start = seq.request.arrival_time, seq.first_scheduled_time
    first, last = seq.first_token_time, stream.last_token_time
    is_finished = seq.state is SeqState.FINISHED
    end = last if is_finished and last is not None else now
    return {
        "queue": (end if start is None else start) - arrival,
        "prefill": None if start is None else (end if first is None else first) - start,
        "decode": None if first is None else end - first,
        "total": end - arrival,
    }
