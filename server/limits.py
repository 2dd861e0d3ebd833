"""Requests and tokens a minute, of all clients and of one key, by buckets that fill steadily."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxpaged.errors import RateLimited

MINUTE_S = 60.0
ALL = ""  # the owner of the buckets that all clients share


class Limits(NamedTuple):
    """Each a minute; None where there is no limit."""

    requests: int | None
    tokens: int | None


NO_LIMITS = Limits(None, None)


@dataclass
class Bucket:
    """`limit` a minute, all at once if nothing was used. It may be overdrawn, and fills first."""

    limit: float
    level: float
    filled_at: float  # seconds, monotonic

    def fill(self, now: float) -> None:
        self.level = min(self.limit, self.level + (now - self.filled_at) * self.limit / MINUTE_S)
        self.filled_at = now

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * MINUTE_S / self.limit)


class RateLimits:
    """The server's buckets, and those of every key that has limits of its own and was seen.

    A request pays 1 when it comes, and its tokens when it has ended: nobody knows them before.
    """

    def __init__(self, of_all: Limits, clock: Callable[[], float] = time.monotonic):
        self._of_all, self._clock = of_all, clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, key_id: str = ALL, own: Limits = NO_LIMITS, spare: float = 0.0) -> None:
        """Let one request of a key pass; work that can wait leaves a share of each limit spare.

        Raises:
            RateLimited: the key, or all clients together, have used up their minute.
        """
        kinds = {kind: self._both(key_id, own, kind) for kind in Limits._fields}
        refusals = [
            _refusal(owner, kind, bucket, least)
            for kind, buckets in kinds.items()
            for owner, bucket in buckets
            if bucket.level < (least := max(1.0, spare * bucket.limit))
        ]
        if refusals:  # all must have passed before another try can be worth it
            raise max(refusals, key=lambda refusal: refusal.retry_after_s)
        for _, bucket in kinds["requests"]:
            bucket.level -= 1

    def charge(self, num_tokens: int, key_id: str = ALL, own: Limits = NO_LIMITS) -> None:
        """Pay for the tokens of a request that has ended."""
        for _, bucket in self._both(key_id, own, "tokens"):
            bucket.level -= num_tokens

    def headers(self, key_id: str = ALL, own: Limits = NO_LIMITS) -> dict[str, str]:
        """What is left of the tighter limit, under the names that OpenAI's clients read."""
        headers: dict[str, str] = {}
        for kind in Limits._fields:
            buckets = [bucket for _, bucket in self._both(key_id, own, kind)]
            if buckets:
                bucket = min(buckets, key=lambda bucket: bucket.level)
                headers[f"x-ratelimit-limit-{kind}"] = f"{bucket.limit:.0f}"
                headers[f"x-ratelimit-remaining-{kind}"] = f"{max(0, int(bucket.level))}"
                wait = bucket.seconds_until(bucket.limit)
                headers[f"x-ratelimit-reset-{kind}"] = f"{wait:.1f}s"
        return headers

    def _both(self, key_id: str, own: Limits, kind: str) -> list[tuple[str, Bucket]]:
        found = [(ALL, self._bucket(ALL, kind, getattr(self._of_all, kind)))]
        if key_id != ALL:
            found.append((key_id, self._bucket(key_id, kind, getattr(own, kind))))
        return [(owner, bucket) for owner, bucket in found if bucket is not None]

    def _bucket(self, owner: str, kind: str, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        now = self._clock()
        bucket = self._buckets.get((owner, kind))
        if bucket is None:
            bucket = self._buckets[owner, kind] = Bucket(limit, limit, now)
        bucket.fill(now)
        return bucket


def _refusal(owner: str, kind: str, bucket: Bucket, least: float) -> RateLimited:
    whose = "the server's limit" if owner == ALL else "the limit of this key"
    wait_s = bucket.seconds_until(least)
    return RateLimited(
        f"{whose} is {bucket.limit:.0f} {kind} a minute: try again in {math.ceil(wait_s)} s",
        retry_after_s=wait_s,
    )
