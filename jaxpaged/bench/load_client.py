"""Load on any OpenAI-compatible `/v1/completions`, from several client processes, without JAX.

    python -m jaxpaged.bench.load_client --url http://127.0.0.1:8000 --model NAME \
        --workload mixed --vocab 152064 --concurrency 256

Prompts go as token ids; every answer is asked for its exact length, greedily, so two servers that
are given the same workload do the same work. Closed loop (`--concurrency`): that many requests are
in flight until none is left, taken from a queue that all processes share. Open loop (`--rate`):
Poisson arrivals, the same for the same seed, and a latency counts from when the request was due, so
that a client or server that falls behind shows. While load runs, a process only stores the time
and the bytes of each read. Prints one line of JSON; exit code 0 if every request got its length.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxpaged.bench.load_report import Answer, parse, summary
from jaxpaged.bench.workloads import WORKLOADS, WorkItem, Workload, build
from jaxpaged.config.flags import ArgumentParser

IDLE_CONNECTION_S = 2.0  # under servers' limits, so that none is reused while it is being closed
START_DELAY_S = 0.05  # every process is back in its event loop by then
GRACE_S = 15.0  # for parsing and handing over, after --timeout
OPEN_LOOP_WARMERS = 8

type Body = tuple[bytes, int]  # a request's JSON, and the tokens that it asks for


@dataclass
class _Shared:
    """What the client processes inherit when they are forked."""

    bodies: list[Body] = field(default_factory=list[Body])
    warmup: list[Body] = field(default_factory=list[Body])
    arrivals: list[float] = field(default_factory=list[float])
    start: Any = None  # the moment at which the clock starts, once all have come to the barrier
    taken: Any = None  # requests taken from the queue
    barrier: Any = None


@dataclass(frozen=True)
class _Seen:
    """What one client process saw."""

    answers: list[Answer]
    warmed: list[Answer]
    cpu_share: float


_shared = _Shared()


async def _send(
    session: aiohttp.ClientSession, url: str, body: Body, answers: list[Answer], due: float = 0.0
) -> None:
    """Send one request and append its answer, whatever goes wrong."""
    now = time.monotonic()
    answer = Answer(body[1], due or now, now)
    answers.append(answer)
    try:
        async with session.post(url + "/v1/completions", data=body[0]) as response:
            async for data in response.content.iter_any():
                answer.reads.append((time.monotonic(), data))
            if response.status != 200:
                text = b"".join(data for _, data in answer.reads).decode(errors="replace")
                answer.error = f"HTTP {response.status}: {text[:300]}"
    except asyncio.CancelledError:
        answer.error = "unfinished when --timeout ran out"
        raise
    except TimeoutError:
        answer.error = "no complete answer within --request-timeout"
    except (aiohttp.ClientError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.end = time.monotonic()


def _next_bodies() -> Iterator[Body]:
    while True:
        with _shared.taken.get_lock():
            i = _shared.taken.value
            _shared.taken.value += 1
        if i >= len(_shared.bodies):
            return
        yield _shared.bodies[i]


async def _finish(jobs: Iterable[Awaitable[None]], until: float) -> None:
    tasks = [asyncio.ensure_future(job) for job in jobs]
    _, late = await asyncio.wait(tasks, timeout=max(0.0, until - time.monotonic()))
    for task in late:
        task.cancel()
    for problem in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(problem, Exception):  # being cancelled is none
            raise problem


async def _load(args: argparse.Namespace, share: int, deadline: float) -> _Seen:
    """One process: warm up, meet the others, send its part of the load."""
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    slots = OPEN_LOOP_WARMERS
    if args.concurrency:
        slots = args.concurrency // args.processes + (share < args.concurrency % args.processes)
    answers: list[Answer] = []
    warmed: list[Answer] = []

    async def drain(bodies: Iterator[Body], into: list[Answer]) -> None:
        for body in bodies:
            await _send(session, args.url, body, into)

    async def send_when_due(i: int) -> None:
        due = _shared.start.value + _shared.arrivals[i]
        await asyncio.sleep(due - time.monotonic())
        await _send(session, args.url, _shared.bodies[i], answers, due)

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    timeout = aiohttp.ClientTimeout(total=args.request_timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        mine = iter(_shared.warmup[share :: args.processes])
        await _finish((drain(mine, warmed) for _ in range(slots)), deadline - args.timeout / 2)
        _shared.barrier.wait(max(0.1, deadline - time.monotonic()))
        await asyncio.sleep(_shared.start.value - time.monotonic())
        cpu, wall = time.process_time(), time.monotonic()
        if _shared.arrivals:
            order = range(share, len(_shared.bodies), args.processes)
            await _finish((send_when_due(i) for i in order), deadline)
        else:
            queue = _next_bodies()
            await _finish((drain(queue, answers) for _ in range(slots)), deadline)
        cpu = (time.process_time() - cpu) / max(1e-9, time.monotonic() - wall)
    for answer in (*answers, *warmed):
        parse(answer)
    return _Seen(answers, warmed, cpu)


def _client_process(args: argparse.Namespace, share: int, deadline: float) -> _Seen:
    signal.alarm(int(deadline - time.monotonic() + GRACE_S))  # ends it, whatever it hangs in
    seen = asyncio.run(_load(args, share, deadline))
    signal.alarm(0)
    return seen


def _run(
    args: argparse.Namespace, items: Sequence[WorkItem], warmup: Sequence[WorkItem]
) -> tuple[list[_Seen], list[str]]:
    """Fork the client processes: what each saw, and what became of those that were lost."""
    deadline = time.monotonic() + args.timeout
    args.processes = min(args.processes, args.concurrency or args.processes, len(items))
    rng, now = random.Random(args.seed), 0.0
    for _ in items if args.rate else ():
        _shared.arrivals.append(now)
        now += rng.expovariate(args.rate)
    fork = multiprocessing.get_context("fork")
    _shared.bodies = [_body(args.model, item) for item in items]
    _shared.warmup = [_body(args.model, item) for item in warmup]
    _shared.start, _shared.taken = fork.Value("d", 0.0), fork.Value("q", 0)
    _shared.barrier = fork.Barrier(args.processes, action=_start_clock)
    seen: list[_Seen] = []
    errors: list[str] = []
    with ProcessPoolExecutor(args.processes, mp_context=fork) as pool:
        shares = range(args.processes)
        clients = [pool.submit(_client_process, args, share, deadline) for share in shares]
        for client in clients:
            try:
                seen.append(client.result())
            except Exception as error:  # a lost client process is a result too
                errors.append(f"client process: {type(error).__name__}: {error}")
    return seen, errors


def _start_clock() -> None:
    """Run once, by the last process that comes to the barrier."""
    _shared.start.value = time.monotonic() + START_DELAY_S


def _body(model: str, item: WorkItem) -> Body:
    body = {"model": model, "prompt": item.prompt, "max_tokens": item.output_len}
    body |= {"temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body, separators=(",", ":")).encode(), item.output_len


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="load_client", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", required=True, help="with or without /v1")
    parser.add_argument("--model", required=True, help="the name that the server serves it under")
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--vocab", type=int, required=True, help="the model's vocab_size")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--concurrency", type=int, help="closed loop: requests in flight")
    mode.add_argument("--rate", type=float, help="open loop: mean arrivals a second")
    parser.add_argument("--limit", type=int, help="requests: the first ones, or all again")
    parser.add_argument("--warmup", type=int, default=0, help="short unmeasured requests first")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--api-key", default="", help="bearer token")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--request-timeout", type=float, default=300.0, help="seconds for one")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--label", default="", help="names the measurement in the line")
    args = parser.parse_args(argv)
    for name in ("concurrency", "rate", "limit", "processes", "timeout", "request_timeout"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be above 0")
    args.url = args.url.rstrip("/").removesuffix("/v1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _options(argv)
    items = build(WORKLOADS[args.workload], args.vocab)
    if args.limit:
        items = [items[i % len(items)] for i in range(args.limit)]
    warmup = build(Workload(args.warmup, (16, 256), (8, 32), seed=1), args.vocab)
    seen, errors = _run(args, items, warmup)
    line: dict[str, Any] = {"label": args.label or args.url, "model": args.model}
    line |= {"load": args.workload, "concurrency": args.concurrency, "rate": args.rate}
    line |= {"seed": args.seed if args.rate else None, "processes": args.processes}
    answers = [answer for one in seen for answer in one.answers]
    warmed = [answer for one in seen for answer in one.warmed]
    line |= summary(items, answers, errors, is_open=bool(args.rate))
    line |= {"warmup_ok": sum(not a.error for a in warmed), "warmup_n": args.warmup}
    line["client_cpu_max"] = round(max((one.cpu_share for one in seen), default=0.0), 3)
    sys.stdout.write(json.dumps(line) + "\n")
    return int(line["ok"] != len(items) or line["length_mismatch"] > 0)


if __name__ == "__main__":
    sys.exit(main())
