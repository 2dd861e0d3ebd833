"""The scheduler without a device: how full it keeps the pages, and random workloads.

    python -m benchmarks.schedule_simulation pages [--requests 10000] [--pages 20000] [--policy P]
    python -m benchmarks.schedule_simulation random [--workloads 10000] [--seed 0]

`pages` runs requests of 32 to 1,024 prompt tokens and 32 to 512 output tokens, all queued at once,
and prints for the steps in which requests wait: tokens stored / tokens of the pages held by
sequences, and pages held / pool; cached pages do not count. `random` runs many small workloads with
random limits, policies, windows, aborts, shared prefixes and forks; after each step all bookkeeping
is checked, and in the end all must have finished and every page be free.
"""

import argparse
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field, replace

from jaxpaged.core.limits import Admission, SchedulerLimits
from jaxpaged.core.local_pages import LocalPages, most_of_decode
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.policies import PolicyName
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState, Sequence

VOCAB, EOS = 32_000, 2
PROMPT_LENS, OUTPUT_LENS = (32, 1024), (32, 512)  # of what fills the pages
ADMISSIONS: tuple[Admission, ...] = ("foresee", "foresee", "evict", "no-evict")
POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "fair", "sjf")


def make_request(number: int, prompt: list[int], max_tokens: int, **fields: object) -> Request:
    request = Request(
        request_id=str(number),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=number,
        arrival_time=0.0,
        eos_token_ids=frozenset({EOS}),
    )
    return replace(request, **fields)


@dataclass
class Simulation:
    """The engine's loop, one step ahead, over a device that samples any token."""

    scheduler: Scheduler
    rng: random.Random
    in_flight: deque[StepPlan] = field(default_factory=deque[StepPlan])
    num_seqs: int = 0

    def add(self, request: Request) -> list[Sequence]:
        seqs: list[Sequence] = []
        for choice in range(request.params.n):
            prompt = list(request.prompt_token_ids)
            seq = Sequence(self.num_seqs, request, choice, prompt, len(prompt))
            self.num_seqs += 1
            self.scheduler.add(seq)
            seqs.append(seq)
        return seqs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self, *, max_in_flight: int = 2) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan:
            self.in_flight.append(plan)
        if self.in_flight and (not plan or len(self.in_flight) >= max_in_flight):
            done, sample = self.in_flight.popleft(), self.rng.randrange
            tokens = [sample(EOS, 9) if yes else None for yes in done.columns.samples]
            self.scheduler.commit(done, tokens)
        elif not plan and self.scheduler.has_work:
            raise AssertionError("nothing runs and nothing can")
        return plan


@dataclass(frozen=True)
class Fullness:
    """Of the steps in which requests waited, once the first of them had filled the pool."""

    num_steps: int
    stored: float  # mean of tokens stored / tokens of the pages held
    least_stored: float
    held: float  # mean of pages held / pool
    least_held: float
    num_preemptions: int
    mean_with_start: float  # of pages held / pool, the steps that first fill the pool included


class FullnessWatch:
    """Looks at a scheduler's pages after each plan."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._first_full = scheduler, 0
        self._stored: list[float] = []
        self._held: list[float] = []

    def look(self) -> None:
        """Note how full the pages are, if anybody waits."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        if not scheduler.num_waiting:
            return
        pages, free_places = pool.num_held, 0
        for seq in scheduler.running:
            free_places += len(seq.page_ids) * pool.page_size - seq.num_computed_tokens
        self._stored.append(1 - free_places / max(pages * pool.page_size, 1))
        self._held.append(pages / pool.num_usable)
        if not self._first_full and self._held[-1] > 0.9:
            self._first_full = len(self._held)

    def found(self) -> Fullness:
        """Raises ValueError where requests never waited for a full pool."""
        stored, held = self._stored[self._first_full :], self._held[self._first_full :]
        return Fullness(
            len(held),
            statistics.fmean(stored),
            min(stored),
            statistics.fmean(held),
            min(held),
            self._scheduler.num_preemptions,
            statistics.fmean(self._held),
        )


def fill_pages(num_requests: int, num_pages: int, policy: PolicyName, seed: int = 0) -> Fullness:
    """Run requests that are all queued at once; the pool, not the slots, is the limit."""
    rng, page_size = random.Random(seed), 16
    limits = SchedulerLimits(
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        scheduling_policy=policy,
    )
    pool = PagePool(num_pages, page_size)
    simulation = Simulation(Scheduler(limits, pool, PrefixCache(pool)), rng)
    for number in range(num_requests):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPT_LENS))]
        fields = {"key_name": f"key {number % 5}", "priority": number % 3}
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = make_request(number, prompt, rng.randint(*OUTPUT_LENS), params=params, **fields)
        simulation.add(request)
    watch = FullnessWatch(simulation.scheduler)
    while simulation.has_work:
        simulation.step()
        watch.look()
    assert pool.num_held == 0
    return watch.found()


def random_workload(seed: int) -> int:
    """Run one small workload to its end and return the number of preemptions.

    Raises:
        InvariantError, AssertionError: pages, slots or sequences do not add up.
    """
    rng = random.Random(seed)
    page_size, longest = rng.choice([1, 2, 4]), 48
    limits = SchedulerLimits(
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([1, 3, 8, 24, 64]),
        max_model_len=longest,
        enable_prefix_caching=rng.random() < 0.8,
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        max_num_scored_tokens=rng.choice([2, 8, 256]),
        reserve_full_prompt=rng.random() < 0.5,
        admission=rng.choice(ADMISSIONS),
        scheduling_policy=rng.choice(POLICIES),
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
        num_host_pages=rng.choice([0, 0, 8, 24, 64]),
        step_sizes=rng.choice([(), (2, 8, 24), (3, 5, 6, 11, 64)]),
    )
    fewest = longest // page_size + 2
    pool = PagePool(rng.randint(fewest, 3 * fewest), page_size)
    window, local = rng.choice([0, 0, 5, 16]), None
    if window:
        fewest = most_of_decode(window, page_size) + 2
        local = LocalPages(pool, window, rng.randint(fewest, 3 * fewest))
    scheduler = Scheduler(limits, pool, PrefixCache(pool, rng.choice([256, 4])), local)
    simulation, seqs = Simulation(scheduler, rng), list[Sequence]()
    most = rng.choice([10] * 19 + [80])  # many, so that lengths of the first ones foretell others
    arrivals = sorted(rng.randrange(20) for _ in range(rng.randint(1, most)))
    max_in_flight, step = rng.choice([1, 2, 2]), 0
    while arrivals or simulation.has_work:
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            seqs += simulation.add(_random_request(rng, step, len(seqs), longest))
        if seqs and rng.random() < 0.03:
            scheduler.abort(rng.choice(seqs))
        if simulation.has_work:
            simulation.step(max_in_flight=max_in_flight)
        scheduler.check()
        step += 1
        if step > 5000:
            raise AssertionError(f"workload {seed}: not finished after {step} steps")
    held = pool.num_held + (local.pool.num_held if local else 0)
    if held or not all(seq.state is SeqState.FINISHED for seq in seqs):
        raise AssertionError(f"workload {seed}: a page is held or a sequence has not finished")
    return scheduler.num_preemptions


def _random_request(rng: random.Random, step: int, number: int, longest: int) -> Request:
    prompt = [7] * rng.randint(0, 14) + [rng.randint(6, 9) for _ in range(rng.randint(1, 12))]
    max_tokens = rng.randint(0, longest - len(prompt))
    params = SamplingParams(
        temperature=0.0,
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=max_tokens,
        presence_penalty=rng.choice([0.0, 0.5]),
        prompt_logprobs=rng.choice([None, None, 1]),
        ignore_eos=rng.random() < 0.5,
        output_kind=rng.choice([OutputKind.DELTA, OutputKind.FINAL_ONLY, OutputKind.FINAL_ONLY]),
    )
    return make_request(
        step * 1000 + number,
        prompt,
        max_tokens,
        params=params,
        key_name=rng.choice("abc"),
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice(["", "", "other"]),
        banned_runs=rng.choice([(), (), ((3, 4),)]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("pages", "random"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=20_000)
    parser.add_argument("--policy", choices=POLICIES, default="fcfs")
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    if args.what == "pages":
        print(f"{args.policy}: {fill_pages(args.requests, args.pages, args.policy, args.seed)}")
    else:
        seeds = range(args.seed, args.seed + args.workloads)
        total = sum(random_workload(seed) for seed in seeds)
        print(f"{args.workloads} workloads ended with every page free, {total} preemptions")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
