"""How long the next step can wait to be planned without the device waiting for it."""

from collections import deque

from jaxpaged.core.buckets import Bucket

NUM_RECENT, LEAST_RECENT = 4, 3  # steps of a size that count, and without which nothing is known
MARGIN_S = 0.002  # that is left of a step when the next one is there, if all is as before
WORTH_S = 0.002  # less is not waited for
SCARCE_S = 0.0003  # left of a step when the next one was there: the device may have waited


class Pace:
    """Learns what steps and planning take. Owned by the step pipeline; times in seconds.

    A step is taken to last as long as the shortest of the last ones of its size, or, where too few
    have been seen, of a smaller one; planning as long as the longest of late.
    """

    def __init__(self):
        self._recent: dict[Bucket, deque[float]] = {}
        self._lead = 0.0

    def planned(self, seconds: float) -> None:
        """From the call to plan a step until the device had it."""
        self._lead = max(seconds, 0.8 * self._lead + 0.2 * seconds)

    def ended(self, bucket: Bucket, seconds: float, left: float | None = None) -> None:
        """A step of this size lasted so long; `left` of it when a step planned late was there."""
        recent = self._recent.setdefault(bucket, deque(maxlen=NUM_RECENT))
        if left is None or left >= SCARCE_S:
            recent.append(seconds)
        else:  # it ended sooner than was seen: for a while none of its size is relied on
            recent.extend([0.0] * LEAST_RECENT)

    def latest(self, bucket: Bucket, begun: float) -> float:
        """When to plan what follows a step of this size that began then; 0 where it is unknown."""
        spare = self._shortest(bucket) - self._lead - MARGIN_S
        return begun + spare if spare >= WORTH_S else 0.0

    def _shortest(self, bucket: Bucket) -> float:
        recent = self._recent.get(bucket, ())
        if len(recent) >= LEAST_RECENT:
            return min(recent)
        return max(
            [
                min(recent)
                for other, recent in self._recent.items()
                if other.num_tokens <= bucket.num_tokens and len(recent) >= LEAST_RECENT
            ],
            default=0.0,
        )
