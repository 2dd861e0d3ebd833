"""What the answers of a load add up to.

    ttft      sent (or due) to the first token chunk
    itl       gap between token chunks of one answer
    tpot      of an answer, (last chunk - first token chunk) / (tokens - 1)
    e2e       sent (or due) to the end of the answer

A token chunk has text, or neither text nor finish_reason: a token whose text is held back. Tokens
are counted by usage alone. Times are milliseconds; rates are a second, from the first request sent
to the last answer complete.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from jaxpaged.bench.workloads import WorkItem, digest


@dataclass
class Answer:
    """One request as the client saw it, in seconds of the system's monotonic clock."""

    asked: int  # tokens
    start: float  # closed loop: when sent; open loop: when due
    sent: float
    end: float = 0.0
    error: str | None = None
    reads: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    token_times: list[float] = field(default_factory=list[float])
    last_chunk: float = 0.0
    text_chunks: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    is_finished: bool = False


def parse(answer: Answer) -> None:
    """Fill in token times, usage and any error told in the body; drop the raw reads."""
    reads, answer.reads = answer.reads, []
    if answer.error:
        return
    try:
        for when, data in _events(reads):
            if data != b"[DONE]":
                _take(answer, when, json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error = f"unreadable answer: {type(error).__name__}: {error}"
    if answer.error is None and not answer.is_finished:
        answer.error = "the answer ended without a finish_reason"


def _events(reads: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Time and data of each server-sent event; its time is that of the read that completed it."""
    rest = b""
    # the last event may lack its blank line
    for when, data in [*reads, (reads[-1][0], b"\n\n")] if reads else []:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield when, b"\n".join(lines)


def _take(answer: Answer, when: float, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        answer.error = answer.error or "in the body: " + json.dumps(chunk["error"])[:300]
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
    for choice in chunk.get("choices", [])[:1]:
        ends = choice.get("finish_reason") is not None
        answer.is_finished |= ends
        answer.last_chunk = when
        answer.text_chunks += bool(choice.get("text"))
        if choice.get("text") or not ends or not answer.token_times:
            answer.token_times.append(when)


def summary(
    items: Sequence[WorkItem], answers: Sequence[Answer], lost: Sequence[str], *, is_open: bool
) -> dict[str, Any]:
    """One line for a whole load; `lost` tells of client processes that failed."""
    ok = [answer for answer in answers if not answer.error]
    errors = Counter(answer.error for answer in answers if answer.error)
    unsent = len(items) - len(answers)
    if unsent:
        errors["no answer recorded" if lost else "not sent before --timeout ran out"] += unsent
    errors.update(lost)
    wall = max(a.end for a in answers) - min(a.start for a in answers) if answers else 0.0
    output_tokens = sum(answer.completion_tokens or 0 for answer in ok)
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in ok)
    chunks = sum(len(answer.token_times) for answer in ok)

    def rate(count: int) -> float:
        return round(count / wall, 3) if wall else 0.0

    return {
        "digest": digest(list(items)),
        "n": len(items),
        "ok": len(ok),
        "failed": len(items) - len(ok),
        "errors": dict(errors.most_common(5)),
        "length_mismatch": sum(answer.completion_tokens != answer.asked for answer in ok),
        "seconds": round(wall, 4),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tok_per_s": rate(output_tokens),
        "total_tok_per_s": rate(prompt_tokens + output_tokens),
        "req_per_s": rate(len(ok)),
        **_latencies(ok),
        "tokens_per_chunk": round(output_tokens / chunks, 3) if chunks else None,
        "text_chunk_share": round(sum(a.text_chunks for a in ok) / chunks, 3) if chunks else None,
        "send_lag_p99": _ms([a.sent - a.start for a in answers], 99).get("p99")
        if is_open
        else None,
    }


def _latencies(ok: Sequence[Answer]) -> dict[str, dict[str, float]]:
    gaps = [b - a for answer in ok for a, b in pairwise(answer.token_times)]
    tpot = [
        (answer.last_chunk - answer.token_times[0]) / (answer.completion_tokens - 1)
        for answer in ok
        if answer.completion_tokens is not None and answer.completion_tokens > 1
    ]
    first = [answer.token_times[0] - answer.start for answer in ok]
    return {
        "ttft_ms": _ms(first, 25, 40, 45, 50, 55, 90, 99),  # half of a closed loop is one burst
        "itl_ms": _ms(gaps, 50, 99),
        "tpot_ms": _ms(tpot, 50, 99),
        "e2e_ms": _ms([answer.end - answer.start for answer in ok], 50, 99),
    }


def _ms(seconds: Sequence[float], *points: int) -> dict[str, float]:
    if not seconds:
        return {}
    found = {f"p{p}": round(1e3 * float(np.percentile(seconds, p)), 3) for p in points}
    return found | {"mean": round(1e3 * float(np.mean(seconds)), 3)}
