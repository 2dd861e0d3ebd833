"""What each mode of `--admission` gives where pages are few: the scheduler over a modelled device.

    python -m benchmarks.admission_simulation [--pages 6870] [--lengths known]

Steps last as those of llama2-13b on one H200 do by a model: reading the weights or multiplying by
them, and reading KV. Requests are queued at once; with `known` they are those of `jaxpaged bench`,
in their order and with the longest answers first, and none can end early. With `unknown` answers
end with an end-of-text token somewhere before `max_tokens`, and the pool has half the pages.
"""

import argparse
import random
from collections import deque
from dataclasses import dataclass

from benchmarks.schedule_simulation import EOS, make_request
from jaxpaged.bench.workloads import WORKLOADS, build
from jaxpaged.core.buckets import default_ladder
from jaxpaged.core.limits import Admission, SchedulerLimits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import Sequence

MODES: tuple[Admission, ...] = ("evict", "no-evict", "foresee")
VOCAB, ROWS, TOKENS, MAX_LEN = 32_000, 256, 8192, 4096
WEIGHTS, KV_BYTES = 13e9, 40 * 40 * 128 * 2 * 2  # parameters; of one token
READ_S, START_S, OTHER_S = 6.7e-3, 0.9e-3, 0.4e-3  # all weights; of a product; all else of a step
FLOPS, BYTES_PER_S = 640e12, 4e12  # attention reads faster than memory: some of it is cached


@dataclass(frozen=True)
class Ask:
    """A request and how long its answer gets."""

    prompt: list[int]
    length: int
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """Of all requests together."""

    num_steps: int
    num_tokens: int  # computed, those computed again included
    num_preemptions: int
    seconds: float  # by the model
    num_output_tokens: int


def step_seconds(plan: StepPlan, num_padded: int) -> float:
    """How long a step takes, padded to so many tokens."""
    seen = sum(plan.columns.starts) + plan.num_tokens
    products = max(READ_S, START_S + 2 * WEIGHTS * num_padded / FLOPS)
    return products + seen * KV_BYTES / BYTES_PER_S + OTHER_S


def play(asks: list[Ask], admission: Admission, num_pages: int) -> Outcome:
    """Answer requests that are all queued at once, one step ahead of the device.

    Answers of a length below `max_tokens` end with an end-of-text token; else nothing ends them.
    """
    ladder = default_ladder("gpu", ROWS, TOKENS)
    limits = SchedulerLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        max_model_len=MAX_LEN,
        admission=admission,
        step_sizes=ladder.step_sizes(),
    )
    pool = PagePool(num_pages, 16)
    scheduler = Scheduler(limits, pool, PrefixCache(pool))
    seqs = [_sequence(number, ask) for number, ask in enumerate(asks)]
    for seq in seqs:
        scheduler.add(seq)
    in_flight, seconds, num_steps, num_tokens = deque[StepPlan](), 0.0, 0, 0
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule()
        if plan:
            in_flight.append(plan)
            num_steps, num_tokens = num_steps + 1, num_tokens + plan.num_tokens
            seconds += step_seconds(plan, ladder.choose(plan).num_tokens)
        if not plan or len(in_flight) == 2:
            done = in_flight.popleft()
            rows = zip(done.columns.seqs, done.columns.samples, strict=True)
            scheduler.commit(done, [_sampled(asks, seq) if yes else None for seq, yes in rows])
    made = sum(len(seq.output_token_ids) for seq in seqs)
    return Outcome(num_steps, num_tokens, scheduler.num_preemptions, seconds, made)


def _sequence(number: int, ask: Ask) -> Sequence:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=ask.max_tokens,
        ignore_eos=ask.length == ask.max_tokens,
        output_kind=OutputKind.FINAL_ONLY,
    )
    request = make_request(number, ask.prompt, ask.max_tokens, params=params)
    return Sequence(number, request, 0, list(ask.prompt), len(ask.prompt))


def _sampled(asks: list[Ask], seq: Sequence) -> int:
    num_made = len(seq.token_ids) - seq.num_prompt_tokens
    return EOS if num_made + 1 >= asks[seq.seq_id].length else EOS + 1


def known_loads() -> dict[str, list[Ask]]:
    """Workloads of `jaxpaged bench`, in both orders."""
    loads = dict[str, list[Ask]]()
    for name in ("decode", "mixed"):
        items = build(WORKLOADS[name], VOCAB)
        asks = [Ask(item.prompt, item.output_len, item.output_len) for item in items]
        loads[name] = asks
        loads[f"{name}, longest first"] = sorted(asks, key=lambda ask: -ask.length)
    return loads


def unknown_loads(num_requests: int) -> dict[str, list[Ask]]:
    """Prompts as in the mixed workload, with answers of several distributions."""
    rng = random.Random(0)
    drawn = {
        "uniform 32 to 511, of 512": (512, lambda: rng.randint(32, 511)),
        "uniform 32 to 511": (2048, lambda: rng.randint(32, 511)),
        "exponential, mean 300": (2048, lambda: 1 + int(rng.expovariate(1 / 300))),
        "log-normal, median 200": (2048, lambda: 1 + int(rng.lognormvariate(5.3, 0.9))),
    }
    loads = dict[str, list[Ask]]()
    for name, (most, draw) in drawn.items():
        loads[name] = [
            Ask(_tokens(rng, 32, 1024), min(draw(), most - 1), most) for _ in range(num_requests)
        ]
    prefix, (most, draw) = _tokens(rng, 1000, 1000), drawn["exponential, mean 300"]
    loads["exponential, after a prefix of 1,000"] = [
        Ask(prefix + _tokens(rng, 16, 200), min(draw(), most - 1), most)
        for _ in range(num_requests)
    ]
    return loads


def _tokens(rng: random.Random, fewest: int, most: int) -> list[int]:
    return [rng.randrange(100, VOCAB) for _ in range(rng.randint(fewest, most))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pages", type=int, default=6870)
    parser.add_argument("--lengths", choices=("known", "unknown"), default="known")
    parser.add_argument(
        "--requests", type=int, default=1000, help="of each load of unknown lengths"
    )
    args = parser.parse_args()
    is_known = args.lengths == "known"
    num_pages = args.pages if is_known else args.pages // 2
    for name, asks in (known_loads() if is_known else unknown_loads(args.requests)).items():
        least = sum(len(ask.prompt) + ask.length - 1 for ask in asks)
        for mode in MODES:
            found = play(asks, mode, num_pages)
            print(
                f"{name:36} {mode:8} {found.num_steps:5} steps, {found.num_tokens / least:.3f} of "
                f"the tokens, {found.num_preemptions:4} preemptions, "
                f"{found.num_output_tokens / found.seconds:5.0f} tokens/s"
            )


if __name__ == "__main__":
    main()
