"""In which order the requests of a call begin that tells all its answers at the end."""

import math
from collections.abc import Iterable

from jaxpaged.core.request import Request

type Job = tuple[str | None, Request]
"""The prompt's text, if it had one, and its request."""


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Jobs by falling `max_tokens` of their requests' params, None first; equals stay in order.

    Long answers that begin last run alone in the end, in steps that are nearly empty. Compared is
    what was asked, not what the context leaves of it: that would part prompts that share pages.
    """
    return sorted(jobs, key=_asked, reverse=True)


def _asked(job: Job) -> float:
    asked = job[1].params.max_tokens
    return math.inf if asked is None else asked
