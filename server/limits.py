"""Limits of a key: requests and tokens a minute, by buckets that fill again steadily."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxpaged.errors import RateLimited

MINUTE_S = 60.0


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


class KeyLimits:
    """Buckets of every key that was seen; without API keys all clients share one.

    A request pays 1 when it comes, and its tokens when it has ended: nobody knows them before.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, key_id: str) -> None:
        """Let one request pass.

        Raises:
            RateLimited: the key has used up its minute.
        """
        requests, tokens = self._bucket(key_id, "requests"), self._bucket(key_id, "tokens")
        if requests is not None and requests.level < 1:
            raise RateLimited(
                f"the limit is {requests.limit:.0f} requests a minute",
                retry_after_s=requests.seconds_until(1),
            )
        if tokens is not None and tokens.level < 1:
            raise RateLimited(
                f"the limit is {tokens.limit:.0f} tokens a minute",
                retry_after_s=tokens.seconds_until(1),
            )
        if requests is not None:
            requests.level -= 1

    def charge(self, key_id: str, num_tokens: int) -> None:
        """Pay for the tokens of a request that has ended."""
        bucket = self._bucket(key_id, "tokens")
        if bucket is not None:
            bucket.level -= num_tokens

    def headers(self, key_id: str) -> dict[str, str]:
        """What is left, under the names that OpenAI's clients read."""
        headers: dict[str, str] = {}
        for kind in self._limits:
            bucket = self._bucket(key_id, kind)
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = f"{bucket.limit:.0f}"
                headers[f"x-ratelimit-remaining-{kind}"] = f"{max(0, int(bucket.level))}"
                wait = bucket.seconds_until(bucket.limit)
                headers[f"x-ratelimit-reset-{kind}"] = f"{wait:.1f}s"
        return headers

    def _bucket(self, key_id: str, kind: str) -> Bucket | None:
        limit = self._limits[kind]
        if limit is None:
            return None
        now = self._clock()
        bucket = self._buckets.get((key_id, kind))
        if bucket is None:
            bucket = self._buckets[key_id, kind] = Bucket(limit, limit, now)
        bucket.fill(now)
        return bucket
