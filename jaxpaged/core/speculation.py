"""Drafts: tokens guessed from the text so far, checked many at a time in one step.

A drafted token is accepted where it equals the token that the row samples at its place. Places are
sampled by keys of their own, so answers are those of a run without drafts, token by token; for a
guess without a distribution this is rejection sampling (accept with probability p(token), else
sample from the rest), the two draws being one.
"""

from collections.abc import Sequence as Seq
from functools import lru_cache

BEGIN, GO_ON = 1.2, 1.05  # gain in tokens a second from which on drafting begins, or goes on
# a step's time over a plain one's: a row with drafts waits until the host has read it, alone or
# beside others that need not wait; and each further token
ALONE, BESIDE_OTHERS, A_TOKEN = 1.5, 2.0, 0.01


@lru_cache(maxsize=4096)
def best_length(
    rate: float, num_rows: int, most: int, limit: float, guess_cost: float = 0.0
) -> int:
    """The draft length with the most tokens a second, 0 where the gain is under `limit`.

    Of a draft whose tokens are each right with probability `rate`, a geometric series is accepted.
    `guess_cost` is the time that guessing a token takes, in plain steps.
    """
    wait = ALONE if num_rows == 1 else BESIDE_OTHERS
    plain = 1 + A_TOKEN * num_rows
    best, found, expected, power = limit, 0, 1.0, 1.0
    for length in range(1, most + 1):
        power *= rate
        expected += power
        cost = wait * (plain + A_TOKEN * num_rows * length) / plain + guess_cost * length
        if expected / cost > best:
            best, found = expected / cost, length
    return found


def count_right(drafted: Seq[int], sampled: Seq[int]) -> int:
    """How many of the drafted tokens are what was sampled at their places, up to the first miss."""
    right = 0
    for guess, token in zip(drafted, sampled, strict=False):
        if guess != token:
            break
        right += 1
    return right
