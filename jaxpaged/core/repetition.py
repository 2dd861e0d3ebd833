"""Answers that say the same again and again, found as their tokens come."""

from dataclasses import dataclass, fields

import numpy as np

from jaxpaged.errors import RequestError

FIELD = "repetition_detection"
FOUND = "repetition_detected"  # the stop reason
MAX_PATTERN = 1024  # tokens; every token of such an answer is compared with so many before it


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Ends an answer whose last tokens are one pattern, `min_count` times in a row.

    Names and meanings are vLLM's. Patterns have `min_pattern_size` (0 is 1) to `max_pattern_size`
    tokens (0 looks for none).

    Raises:
        RequestError: sizes or a count that cannot be.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self):
        for name in [one.name for one in fields(self)]:
            value = getattr(self, name)
            most = 2**31 - 1 if name == "min_count" else MAX_PATTERN
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise RequestError(
                    f"{FIELD}.{name} is {value!r}, allowed are 0 to {most}", param=FIELD
                )
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"{FIELD}.min_pattern_size is {self.min_pattern_size}, over max_pattern_size of "
                f"{self.max_pattern_size}: lower it",
                param=FIELD,
            )
        if self.max_pattern_size and self.min_count < 2:
            raise RequestError(
                f"{FIELD}.min_count is {self.min_count}, it must be at least 2; max_pattern_size 0 "
                "looks for nothing",
                param=FIELD,
            )


class RepetitionWatch:
    """Reads one answer, token by token."""

    def __init__(self, wanted: RepetitionDetectionParams):
        self._least = max(1, wanted.min_pattern_size)
        sizes = np.arange(self._least, wanted.max_pattern_size + 1)
        self._needed = sizes * (wanted.min_count - 1)
        # of each size, how many of the last tokens are as the one so far before them
        self._runs = np.zeros(len(sizes), np.int64)
        self._recent = np.full(wanted.max_pattern_size, -1)  # the latest first

    def repeats(self, token_id: int) -> bool:
        """Read the next token; whether the tokens up to it end in a pattern, often enough."""
        self._runs = (self._runs + 1) * (self._recent[self._least - 1 :] == token_id)
        self._recent[1:] = self._recent[:-1]
        self._recent[:1] = token_id
        return bool((self._runs >= self._needed).any())
