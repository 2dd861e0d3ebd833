"""Drafts: tokens guessed from the text so far, checked many at a time in one step.

A drafted token is accepted where it equals the token that the row samples at its place. Places are
sampled by keys of their own, so answers are those of a run without drafts, token by token; for a
guess without a distribution this is rejection sampling (accept with probability p(token), else
sample from the rest), the two draws being one.
"""

from collections.abc import Sequence as Seq
from functools import lru_cache

BEGIN, GO_ON = 1.2, 1.05  # gain in tokens a second from which on drafting begins, or goes on
# time from one step of a row with drafts to its next, in steps that wait for nobody: the host must
# have read it, where all rows wait, or beside others that need not; and each further token's
ALL_WAIT, BESIDE_OTHERS, A_TOKEN = 1.5, 2.0, 0.01
LEAST_RATE = 1 - 1 / (GO_ON * ALL_WAIT)  # of right guesses: with less no length gains so much


def draft_cost(wait: float, num_rows: int, num_guessed: int) -> float:
    """From one step with drafts to the next, in plain steps one by one."""
    return wait * (1 + A_TOKEN * num_guessed / (1 + A_TOKEN * num_rows))


@lru_cache(maxsize=4096)
def best_length(
    rate: float, num_rows: int, most: int, limit: float, wait: float, guess_cost: float = 0.0
) -> tuple[int, float]:
    """The draft length with the most tokens a second, and their gain; 0 where it is under `limit`.

    Of a draft whose tokens are each right with probability `rate`, a geometric series is accepted.
    `guess_cost` is the time that guessing a token takes, in plain steps.
    """
    best, found, expected, power = limit, 0, 1.0, 1.0
    for length in range(1, most + 1):
        power *= rate
        expected += power
        cost = draft_cost(wait, num_rows, num_rows * length) + guess_cost * length
        if expected / cost > best:
            best, found = expected / cost, length
    return found, best if found else 1.0


def best_lengths(
    rates: Seq[float], limits: Seq[float], most: int, guess_cost: float, single_cost: float
) -> list[int]:
    """The draft length of every row; all 0 where drafts cost the step's rows more than they gain.

    Args:
        limits: from which gain on each row drafts.
        single_cost: of steps one by one, over those where nobody drafts, of which a small model has
            several in one program.
    """
    num_rows, found = len(rates), list[tuple[int, float]]()
    if max(rates, default=0.0) <= LEAST_RATE:
        return [0] * num_rows
    for wait in (ALL_WAIT, BESIDE_OTHERS):
        sizes = num_rows, most
        found = [
            best_length(rate, *sizes, limit, wait, guess_cost)
            for rate, limit in zip(rates, limits, strict=True)
        ]
        if all([length for length, _ in found]):
            break
    gain = sum([gain for _, gain in found])
    least = sum([limit if row[0] else 1.0 for row, limit in zip(found, limits, strict=True)])
    return [length if gain > single_cost * least else 0 for length, _ in found]


def count_right(drafted: Seq[int], sampled: Seq[int]) -> int:
    """How many of the drafted tokens are what was sampled at their places, up to the first miss."""
    right = 0
    for guess, token in zip(drafted, sampled, strict=False):
        if guess != token:
            break
        right += 1
    return right
