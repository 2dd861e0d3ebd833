"""A load over HTTP without a device or sockets: first tokens, gaps and tokens a second of a policy.

    python -m benchmarks.http_simulation mixed [--budget 8192] [--rate 8] [--runs 8] [--at-once]

The real scheduler, bucket ladder and pace run one step ahead, as the engine does. Clients, front,
engine and device are what `Costs` says: milliseconds measured with qwen2.5-7b on one H200 and, for
the front and the host, estimated from CPU times. At random clients think for longer or shorter,
steps last up to 1 % longer, and one plan in 50 takes 2 ms more on average. Means and standard
deviations of the runs are shown.
"""

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.schedule_simulation import make_request
from jaxpaged.bench.workloads import WORKLOADS, build
from jaxpaged.core.buckets import Bucket, default_ladder
from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.engine.inbox import PIECE
from jaxpaged.engine.pace import Pace

ROWS, VOCAB, MAX_LEN, PAGES = 256, 152_064, 4096, 60_000
WIRE_MS, CLIENT_MS = 0.1, 0.5  # a message's way; from an answer's end to the next request
BURST_MS = 8.0  # in which clients that start together send

type Event = tuple[int, bool]  # of a sequence: whether it is its last


@dataclass(frozen=True)
class Costs:
    """Milliseconds, and bytes and operations a millisecond."""

    tokens: tuple[float, ...] = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    products: tuple[float, ...] = (4.15, 4.25, 4.7, 5.3, 6.75, 11.0, 20.4, 39.9, 79.3, 158.5)
    kv_bytes: int = 28 * 4 * 128 * 2 * 2  # a token
    decode_bytes: float = 3.0e9
    decode_bytes_mixed: float = 1.8e9  # of decodes in a mixed step
    pair_operations: int = 4 * 28 * 28 * 128  # a query and a key
    operations: float = 350e9
    mixed: float = 0.3
    plan: tuple[float, float] = (0.9, 0.001)  # a step, and each row of it
    commit: tuple[float, float] = (0.3, 0.004)
    read: tuple[float, float] = (0.4, 0.0005)  # the front: a request, and each of its tokens
    submit: tuple[float, float] = (0.15, 0.0003)  # the engine's event loop: likewise
    chunk: float = 0.016
    end: float = 0.06  # the front: an answer's end, in the pass after its last chunk

    def of_step(self, plan: StepPlan, bucket: Bucket) -> float:
        columns, is_decode = plan.columns, bucket.kind == "decode"
        seen = sum(s + 1 for s, q in zip(columns.starts, columns.q_lens, strict=True) if q == 1)
        total = float(np.interp(bucket.num_tokens, self.tokens, self.products))
        rate = self.decode_bytes if is_decode else self.decode_bytes_mixed
        total += seen * self.kv_bytes / rate
        if is_decode:
            return total
        chunks = [(s, q) for s, q in zip(columns.starts, columns.q_lens, strict=True) if q > 1]
        pairs = sum(q * (s + q / 2) for s, q in chunks)
        return total + self.mixed + pairs * self.pair_operations / self.operations


class _Started(NamedTuple):
    plan: StepPlan
    bucket: Bucket
    time: float
    ends: float


class HttpSimulation:
    """One load. A closed loop of `concurrency` requests, or with `rate` arrivals a second.

    With `waits` planning waits for newcomers as the engine's does, else it never does.
    """

    def __init__(
        self,
        workload: str,
        budget: int,
        concurrency: int,
        rate: float,
        costs: Costs,
        seed: int,
        *,
        waits: bool = True,
    ):
        self._waits, self._pace, self._is_planned_late = waits, Pace(), False
        self._costs, self._rng, self._concurrency = costs, random.Random(seed), concurrency
        self._items, self._rate = build(WORKLOADS[workload], VOCAB), rate
        limits = SchedulerLimits(
            max_num_seqs=ROWS,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            enable_prefix_caching=False,
        )
        pool = PagePool(PAGES, 16)
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool))
        self.ladder = default_ladder("gpu", ROWS, budget)
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._sent: dict[int, float] = {}
        self._times: list[list[float]] = [[] for _ in self._items]
        self._num_told = [0] * len(self._items)
        self._end = 0.0
        self._bodies, self._told, self._num_ends = deque[int](), list[Event](), 0  # of the front
        self._front_is_busy = self._engine_is_busy = False
        self._submit_free = self._device_free = self._last_read = 0.0
        self._arrived, self._in_flight = deque[int](), deque[_Started]()

    def run(self) -> dict[str, float]:
        """Milliseconds and tokens a second."""
        if self._rate:
            arrivals, now = random.Random(0), 0.0
            for _ in self._items:
                self._at(now, self._send)
                now += 1e3 * arrivals.expovariate(self._rate)
        else:
            for place in range(self._concurrency):
                self._at(BURST_MS * place / self._concurrency, self._send)
        while self._agenda:
            now, _, what = heapq.heappop(self._agenda)
            what(now)
        first = [times[0] - self._sent[i] for i, times in enumerate(self._times)]
        gaps = [after - before for times in self._times for before, after in pairwise(times)]
        found = {"tokens/s": 1e3 * sum(map(len, self._times)) / (self._end - self._sent[0])}
        for name, values in (("first token", first), ("gap", gaps)):
            for point in (50, 99):
                found[f"{name} p{point}"] = float(np.percentile(values, point))
        return found

    def _at(self, time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), what))

    def _send(self, now: float) -> None:
        i = len(self._sent)
        if i < len(self._items):
            self._sent[i] = now
            self._at(now + WIRE_MS, lambda now: self._front(now, lambda: self._bodies.append(i)))

    def _front(self, now: float, enqueue: Callable[[], None]) -> None:
        enqueue()
        if not self._front_is_busy:
            self._front_is_busy = True
            self._front_next(now)

    def _front_next(self, now: float) -> None:
        """A pass of its event loop: ends of answers, a piece of a step, and one request is read."""
        if not (self._told or self._num_ends or self._bodies):
            self._front_is_busy = False
            return
        num_ends, self._num_ends = self._num_ends, 0
        for _ in range(num_ends):
            now += self._costs.end
            self._end = now + WIRE_MS
            if not self._rate:
                self._at(now + CLIENT_MS * self._rng.expovariate(1), self._send)
        piece, self._told = self._told[:PIECE], self._told[PIECE:]
        for i, is_last in piece:
            now += self._costs.chunk
            self._times[i].append(now)
            self._num_ends += is_last
        if self._bodies:
            i = self._bodies.popleft()
            num_tokens = len(self._items[i].prompt)
            now += _cost(self._costs.read, num_tokens) * self._rng.uniform(0.8, 1.3)
            begin = max(now + WIRE_MS, self._submit_free)
            self._submit_free = begin + _cost(self._costs.submit, num_tokens)
            self._at(self._submit_free, lambda now: self._arrive(now, i))
        self._at(now, self._front_next)

    def _arrive(self, now: float, i: int) -> None:
        self._arrived.append(i)
        if not self._engine_is_busy:
            self._engine_is_busy = True
            self._step(now)

    def _step(self, now: float) -> None:
        """Plan and start the next step, now or as late as the pace allows."""
        self._take_arrived()
        scheduler = self.scheduler
        if self._waits and ROWS - scheduler.num_running > scheduler.num_waiting:
            latest = self._latest()
            if latest > now:
                self._is_planned_late = True
                return self._at(latest, self._plan)
        return self._plan(now)

    def _latest(self) -> float:
        """When to plan the next step at the latest, 0 for at once."""
        if len(self._in_flight) != 1:
            return 0.0
        started = self._in_flight[0]
        begun = max(started.time, self._last_read)
        return 1e3 * self._pace.latest(started.bucket, begun / 1e3)

    def _plan(self, now: float) -> None:
        """Plan and start the next step, then wait for the one before."""
        self._take_arrived()
        if not (self.scheduler.has_work or self._in_flight):
            self._engine_is_busy = False
            return
        plan = self.scheduler.schedule()
        if plan:
            takes = _cost(self._costs.plan, plan.num_rows) * self._rng.uniform(0.8, 1.2)
            takes += self._rng.expovariate(0.5) if self._rng.random() < 0.02 else 0.0
            self._pace.planned(takes / 1e3)
            now += takes
            bucket = self.ladder.choose(plan)
            lasts = self._costs.of_step(plan, bucket) * (1 + 0.01 * self._rng.random())
            self._device_free = max(now, self._device_free) + lasts
            self._in_flight.append(_Started(plan, bucket, now, self._device_free))
        if plan and len(self._in_flight) < 2:
            self._at(now, self._step)
        else:
            done = self._in_flight.popleft()
            self._at(max(now, done.ends), lambda read: self._read(now, read, done))

    def _read(self, asked: float, now: float, done: _Started) -> None:
        left = (now - asked) / 1e3 if self._is_planned_late else None
        self._is_planned_late = False
        self._pace.ended(done.bucket, (now - max(done.time, self._last_read)) / 1e3, left)
        self._last_read = now
        self._commit(now, done.plan)

    def _take_arrived(self) -> None:
        while self._arrived:
            i = self._arrived.popleft()
            item = self._items[i]
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            request = make_request(i, item.prompt, item.output_len, params=params)
            self.scheduler.add(Sequence(i, request, 0, list(item.prompt), len(item.prompt)))

    def _commit(self, now: float, plan: StepPlan) -> None:
        columns, events = plan.columns, deque[Event]()
        self.scheduler.commit(plan, [7 if samples else None for samples in columns.samples])
        for seq, samples in zip(columns.seqs, columns.samples, strict=True):
            i = seq.seq_id
            if samples and self._num_told[i] < self._items[i].output_len:
                self._num_told[i] += 1
                events.appendleft((i, seq.state is SeqState.FINISHED))
        now += _cost(self._costs.commit, plan.num_rows)
        if events:
            told = sorted(events, key=lambda event: not event[1])
            self._at(now + WIRE_MS, lambda now: self._front(now, lambda: self._told.extend(told)))
        self._at(now, self._step)


def _cost(costs: tuple[float, float], count: int) -> float:
    return costs[0] + costs[1] * count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workload", choices=("decode", "mixed"))
    parser.add_argument("--budget", type=int, default=8192, help="tokens a step")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.0, help="arrivals a second instead")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--at-once", action="store_true", help="planning never waits")
    args = parser.parse_args()
    load = args.workload, args.budget, args.concurrency, args.rate, Costs()
    seeds, waits = range(args.runs), not args.at_once
    found = [HttpSimulation(*load, seed, waits=waits).run() for seed in seeds]
    for name in found[0]:
        values = [run[name] for run in found]
        print(f"{name}: {np.mean(values):.1f} +- {np.std(values):.1f}")


if __name__ == "__main__":
    main()
