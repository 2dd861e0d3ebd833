"""A load over HTTP without a device or sockets: first tokens, gaps and tokens a second of a policy.

    python -m benchmarks.http_simulation mixed [--budget 8192] [--rate 8] [--runs 4]

The real scheduler and bucket ladder run one step ahead, as the engine does. Clients, front, engine
and device are what `Costs` says: milliseconds measured with qwen2.5-7b on one H200 and, for the
front, estimated from CPU times. Steps last up to 1 % longer at random; means of the runs are shown.
"""

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

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

ROWS, VOCAB, MAX_LEN, PAGES = 256, 152_064, 4096, 60_000
WIRE_MS, CLIENT_MS = 0.1, 0.5  # a message's way; from an answer's end to the next request

type Event = tuple[int, bool]  # of a sequence: whether it is its last


@dataclass(frozen=True)
class Costs:
    """Milliseconds, and bytes and operations a millisecond."""

    tokens: tuple[float, ...] = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    products: tuple[float, ...] = (4.15, 4.25, 4.7, 5.3, 6.85, 11.4, 21.4, 41.8, 83.0, 166.0)
    kv_bytes: int = 28 * 4 * 128 * 2 * 2  # a token
    decode_bytes: float = 3.0e9
    decode_bytes_mixed: float = 1.8e9  # of decodes in a mixed step
    pair_operations: int = 4 * 28 * 28 * 128  # a query and a key
    operations: float = 350e9
    mixed: float = 0.3
    plan: tuple[float, float] = (0.3, 0.006)  # a step, and each row of it
    commit: tuple[float, float] = (0.35, 0.008)
    read: tuple[float, float] = (0.4, 0.0005)  # the front: a request, and each of its tokens
    submit: tuple[float, float] = (0.15, 0.0003)  # the engine's event loop: likewise
    chunk: float = 0.025

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


class HttpSimulation:
    """One load. A closed loop of `concurrency` requests, or with `rate` arrivals a second."""

    def __init__(
        self, workload: str, budget: int, concurrency: int, rate: float, costs: Costs, seed: int
    ):
        self._costs, self._rng, self._concurrency = costs, random.Random(seed), concurrency
        self._items, self._rate = build(WORKLOADS[workload], VOCAB), rate
        self.ladder = default_ladder("gpu", ROWS, budget)
        limits = SchedulerLimits(
            max_num_seqs=ROWS,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            enable_prefix_caching=False,
            step_sizes=self.ladder.step_sizes(),
        )
        pool = PagePool(PAGES, 16)
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool))
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._sent: dict[int, float] = {}
        self._times: list[list[float]] = [[] for _ in self._items]
        self._num_told = [0] * len(self._items)
        self._end = 0.0
        self._bodies, self._steps = deque[int](), deque[list[Event]]()  # that the front is to do
        self._front_is_busy = self._engine_is_busy = False
        self._submit_free = self._device_free = 0.0
        self._arrived, self._in_flight = deque[int](), deque[tuple[StepPlan, float]]()

    def run(self) -> dict[str, float]:
        """Milliseconds and tokens a second."""
        if self._rate:
            arrivals, now = random.Random(0), 0.0
            for _ in self._items:
                self._at(now, self._send)
                now += 1e3 * arrivals.expovariate(self._rate)
        else:
            for place in range(self._concurrency):
                self._at(0.02 * (place // 4), self._send)
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
        """One thread: tokens of a step before the next request is read."""
        if self._steps:
            for i, is_last in reversed(self._steps.popleft()):
                now += self._costs.chunk
                self._times[i].append(now)
                if is_last:
                    self._end = now + WIRE_MS
                    if not self._rate:
                        self._at(now + CLIENT_MS, self._send)
        elif self._bodies:
            i = self._bodies.popleft()
            num_tokens = len(self._items[i].prompt)
            now += _cost(self._costs.read, num_tokens)
            begin = max(now + WIRE_MS, self._submit_free)
            self._submit_free = begin + _cost(self._costs.submit, num_tokens)
            self._at(self._submit_free, lambda now: self._arrive(now, i))
        else:
            self._front_is_busy = False
            return
        self._at(now, self._front_next)

    def _arrive(self, now: float, i: int) -> None:
        self._arrived.append(i)
        if not self._engine_is_busy:
            self._engine_is_busy = True
            self._step(now)

    def _step(self, now: float) -> None:
        """Plan and start the next step, then wait for the one before."""
        self._take_arrived()
        if not (self.scheduler.has_work or self._in_flight):
            self._engine_is_busy = False
            return
        plan = self.scheduler.schedule()
        if plan:
            now += _cost(self._costs.plan, plan.num_rows)
            lasts = self._costs.of_step(plan, self.ladder.choose(plan))
            begin = max(now, self._device_free)
            self._device_free = begin + lasts * (1 + 0.01 * self._rng.random())
            self._in_flight.append((plan, self._device_free))
        if plan and len(self._in_flight) < 2:
            self._at(now, self._step)
        else:
            done, ended = self._in_flight.popleft()
            self._at(max(now, ended), lambda now: self._commit(now, done))

    def _take_arrived(self) -> None:
        while self._arrived:
            i = self._arrived.popleft()
            item = self._items[i]
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            request = make_request(i, item.prompt, item.output_len, params=params)
            self.scheduler.add(Sequence(i, request, 0, list(item.prompt), len(item.prompt)))

    def _commit(self, now: float, plan: StepPlan) -> None:
        columns, events = plan.columns, list[Event]()
        self.scheduler.commit(plan, [7 if samples else None for samples in columns.samples])
        for seq, samples in zip(columns.seqs, columns.samples, strict=True):
            i = seq.seq_id
            if samples and self._num_told[i] < self._items[i].output_len:
                self._num_told[i] += 1
                events.append((i, seq.state is SeqState.FINISHED))
        now += _cost(self._costs.commit, plan.num_rows)
        if events:
            told_at = now + WIRE_MS
            self._at(told_at, lambda now: self._front(now, lambda: self._steps.append(events)))
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
    args = parser.parse_args()
    load = args.workload, args.budget, args.concurrency, args.rate, Costs()
    found = [HttpSimulation(*load, seed).run() for seed in range(args.runs)]
    for name in found[0]:
        print(f"{name}: {np.mean([run[name] for run in found]):.1f}")


if __name__ == "__main__":
    main()
