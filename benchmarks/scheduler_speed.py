"""Host time of one step: planning, choosing a bucket, building the batch, committing.

    python benchmarks/scheduler_speed.py [--seqs 256 1024] [--steps 200]

Prints median and least CPU time of each part in microseconds, for running decodes one step ahead of
the device; what prompt lookup costs where it never guesses; the first step of a long prompt, and
the time to hash it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import default_ladder
from jaxpaged.core.hashing import as_bytes, page_hashes
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerLimits
from jaxpaged.core.sequence import Sequence
from jaxpaged.engine.collector import calm_collector

VOCAB = 128256
PAGE_SIZE = 16
MAX_LEN = 4096
PROMPT_LEN = 128

KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=2048),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=2048),
    "penalties": SamplingParams(presence_penalty=0.5, max_tokens=2048),
}


def sequence(seq_id: int, params: SamplingParams, prompt_len: int) -> Sequence:
    prompt = [(seq_id * 7919 + i) % VOCAB for i in range(prompt_len)]
    request = Request(
        request_id=str(seq_id),
        prompt_token_ids=tuple(prompt),
        params=params,
        max_tokens=params.max_tokens or 1,
        seed=seq_id,
        arrival_time=0.0,
        eos_token_ids=frozenset({2}),
    )
    return Sequence(seq_id, request, 0, prompt, prompt_len)


def full_scheduler(
    num_seqs: int,
    params: SamplingParams,
    prompt_len: int = PROMPT_LEN,
    budget: int = 8192,
    speculation: Speculation | None = None,
) -> Scheduler:
    """A scheduler with as many sequences as it has slots, all of them waiting."""
    pool = PagePool(num_seqs * MAX_LEN // PAGE_SIZE + 1, PAGE_SIZE)
    limits = SchedulerLimits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        speculation=speculation,
        step_sizes=default_ladder("gpu", num_seqs, budget).step_sizes(),
    )
    scheduler = Scheduler(limits, pool, PrefixCache(pool))
    for seq_id in range(num_seqs):
        scheduler.add(sequence(seq_id, params, prompt_len))
    return scheduler


def time_steps(num_seqs: int, params: SamplingParams, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part, step by step, once all sequences decode."""
    scheduler = full_scheduler(num_seqs, params)
    builder = BatchBuilder(MAX_LEN // PAGE_SIZE, PAGE_SIZE, num_seqs, VOCAB, {})
    ladder = default_ladder("gpu", num_seqs, 8192)
    times: dict[str, list[float]] = {"schedule": [], "choose": [], "build": [], "commit": []}
    ahead = StepPlan()
    while len(times["commit"]) < num_steps:
        plan, plan_s = timed(scheduler.schedule)
        bucket, choose_s = timed(lambda plan=plan: ladder.choose(plan))
        _, build_s = timed(lambda plan=plan, bucket=bucket: builder.build(plan, bucket))
        sampled = [11 if samples else None for samples in ahead.columns.samples]
        _, commit_s = timed(lambda ahead=ahead, sampled=sampled: scheduler.commit(ahead, sampled))
        if ahead.num_tokens == ahead.num_rows == num_seqs:
            for name, seconds in zip(times, (plan_s, choose_s, build_s, commit_s), strict=True):
                times[name].append(seconds)
        ahead = plan
    return times


def time_lookup(num_seqs: int, num_tokens: int, speculation: Speculation | None) -> list[float]:
    """Seconds of each step, planning and committing, of answers in which no token comes twice.

    Prompts are as long; they begin and end some steps apart.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    scheduler = full_scheduler(num_seqs, params, num_tokens, 2048, speculation)
    times, ahead = list[float](), StepPlan()
    calm_collector()
    while scheduler.has_work or ahead:
        plan, plan_s = timed(scheduler.schedule)
        token = VOCAB + len(times)
        sampled = [token if samples else None for samples in ahead.columns.samples]
        _, commit_s = timed(lambda ahead=ahead, sampled=sampled: scheduler.commit(ahead, sampled))
        times.append(plan_s + commit_s)
        ahead = plan
    return times


def time_admission(num_tokens: int) -> dict[str, float]:
    """Seconds of the first step of a long prompt, queueing included: cold, and found whole.

    Its hashes are there already: the thread that tokenises makes them.
    """
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_model_len=2 * num_tokens,
    )
    pool = PagePool(4 * num_tokens // PAGE_SIZE, PAGE_SIZE)
    scheduler = Scheduler(limits, pool, PrefixCache(pool))
    ids = tuple((i * 7919) % VOCAB for i in range(num_tokens))
    plain = Request("0", ids, KINDS["greedy"], 2048, 0, 0.0, frozenset({2}))
    plain = replace(plain, prompt_bytes=as_bytes(ids))
    times: dict[str, float] = {}
    calm_collector()
    for seq_id, kind in enumerate(("cold", "warm")):
        request = replace(plain, page_hashes=tuple(page_hashes(ids, PAGE_SIZE, "")))

        def begin(seq_id: int = seq_id, request: Request = request) -> StepPlan:
            hashes = list(request.page_hashes)
            seq = Sequence(seq_id, request, 0, list(ids), num_tokens, page_hashes=hashes)
            scheduler.add(seq)
            return scheduler.schedule()

        plan, times[kind] = timed(begin)
        while plan:
            samples = plan.columns.samples
            scheduler.commit(plan, [11 if yes else None for yes in samples])
            if samples[0]:
                scheduler.abort(plan.columns.seqs[0])
            plan = scheduler.schedule()
    return times


def timed[T](call: Callable[[], T]) -> tuple[T, float]:
    start = time.thread_time()
    result = call()
    return result, time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    for num_seqs in args.seqs:
        for kind, params in KINDS.items():
            times = time_steps(num_seqs, params, args.steps)
            total = [sum(parts) for parts in zip(*times.values(), strict=True)]
            for name, seconds in [*times.items(), ("all", total)]:
                median, least = statistics.median(seconds) * 1e6, min(seconds) * 1e6
                print(f"{num_seqs:5} {kind:10} {name:9} median {median:7.0f} least {least:7.0f} us")
    for name, speculation in (("without", None), ("with", Speculation("ngram", 5, 4, 2))):
        for num_seqs in (128, 32):
            seconds = time_lookup(num_seqs, 500, speculation)
            total, median, most = sum(seconds), statistics.median(seconds), max(seconds)
            print(
                f"{num_seqs:5} answers of 500 tokens {name} lookup: {total * 1e3:.0f} ms, median "
                f"{median * 1e6:.0f} us, longest step {most * 1e3:.1f} ms"
            )
    for kind, seconds in time_admission(100_000).items():
        print(f"admission of 100,000 tokens, {kind}: {seconds * 1e3:.1f} ms")
    ids = [(i * 7919) % VOCAB for i in range(100_000)]
    seconds = min(timed(lambda: page_hashes(ids, PAGE_SIZE, ""))[1] for _ in range(5))
    print(f"hashes of {len(ids)} tokens: {seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
