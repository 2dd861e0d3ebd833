"""When the requests of a call begin that tells all its answers at the end."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import fmean

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.stagger import Kind, Room, Stagger, find_stagger

type Job = tuple[str | None, Request]
"""The prompt's text, if it had one, and its request."""

MOST_LENGTHS = 8  # of answers: where there are more, not many end together


def in_time(jobs: Sequence[Job], scheduler: Scheduler) -> tuple[list[Job], Callable[[], int]]:
    """The jobs longest first, and what tells how many of them may have begun by now.

    That is all of them, unless all lengths are known and some begin later so that all end sooner.
    """
    ordered, everybody = longest_first(jobs), max(1, len(jobs))
    stagger = _stagger([request for _, request in ordered], scheduler)

    def most() -> int:
        nonlocal stagger
        if stagger is not None and _is_past(stagger, scheduler):
            stagger = None
        return everybody if stagger is None else stagger.first

    return ordered, most


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Jobs by falling `max_tokens` of their requests' params, None first; equals stay in order.

    Long answers that begin last run alone in the end, in steps that are nearly empty. Compared is
    what was asked, not what the context leaves of it: that would part prompts that share pages.
    """
    return sorted(jobs, key=_asked, reverse=True)


def _asked(job: Job) -> float:
    asked = job[1].params.max_tokens
    return math.inf if asked is None else asked


def _is_past(stagger: Stagger, scheduler: Scheduler) -> bool:
    """Whether the first ones have sampled enough; asked before any began, they have not."""
    running = scheduler.running[:1]
    return any(seq.num_output_tokens >= stagger.tokens for seq in running)


def _stagger(requests: Sequence[Request], scheduler: Scheduler) -> Stagger | None:
    """Which of them begin first, if it is worth it: without prefixes that they share, on a device
    that has nothing else to do.
    """
    limits, pool = scheduler.limits, scheduler.pool
    is_idle = not scheduler.has_work and scheduler.local is None
    if limits.admission != "foresee" or not is_idle or len(requests) < 2:
        return None
    if not all(r.has_known_length and r.max_tokens > 1 and r.params.n == 1 for r in requests):
        return None
    first_pages = {request.prompt_token_ids[: pool.page_size] for request in requests}
    if limits.enable_prefix_caching and len(first_pages) < len(requests):
        return None
    kinds: list[Kind] = []
    for answer, group in groupby(requests, key=lambda request: request.max_tokens):
        prompts = [len(request.prompt_token_ids) for request in group]
        kinds.append(Kind(math.ceil(fmean(prompts)), answer, len(prompts)))
        if len(kinds) > MOST_LENGTHS:
            return None
    room = Room(pool.num_usable - pool.num_held, pool.page_size, limits.max_num_seqs)
    fits_alone = [pool.pages_for(kind.prompt + kind.answer) <= room.pages for kind in kinds]
    return find_stagger(kinds, room) if all(fits_alone) else None
