"""What the detection of repetition must find, by looking at all that was said."""

from collections.abc import Sequence

from jaxpaged.core.repetition import RepetitionDetectionParams


def num_until_repetition(
    ids: Sequence[int], wanted: RepetitionDetectionParams, least: int = 0
) -> int | None:
    """Tokens of `ids`, no fewer than `least`, with which they first repeat themselves."""
    ids, count = list(ids), wanted.min_count
    for num in range(max(1, least), len(ids) + 1):
        for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
            if size * count <= num and ids[:num][-size * count :] == ids[:num][-size:] * count:
                return num
    return None
