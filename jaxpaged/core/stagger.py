"""When sequences of known lengths begin that do not all fit at once, so that all end soonest.

Sequences that begin together grow together and need most pages at the same time: the last step of
all. If only some begin at first and the others when these are half-way, the others find pages that
they would else wait for until the first have ended.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

GRID = 16  # numbers of first sequences, and of steps, that are tried
LEAST_GAIN = 0.03  # of all steps
MOST_WAVES = 4  # times as many sequences as run at once are looked at, of more the first


@dataclass(frozen=True)
class Kind:
    """So many sequences of these lengths, in tokens."""

    prompt: int
    answer: int
    count: int


@dataclass(frozen=True)
class Room:
    """What sequences share: pages, and places among those that run."""

    pages: int
    page_size: int
    seqs: int


@dataclass(frozen=True)
class Stagger:
    """The first so many begin at once, the others not before these have sampled `tokens` each."""

    first: int
    tokens: int


def find_stagger(kinds: Seq[Kind], room: Room) -> Stagger | None:
    """What lets all end soonest, or None where it gains little over beginning as early as may be.

    Kinds stand in the order in which they begin, each of which fits alone. Cost: some 250 walks
    along the steps, a second at most.
    """
    kinds = _some_of(kinds, MOST_WAVES * room.seqs)
    usual = count_steps(kinds, room, None)
    most, longest = sum(kind.count for kind in kinds), max(kind.answer for kind in kinds)
    most = min(most, room.seqs)
    firsts = sorted({max(1, most * i // GRID) for i in range(1, GRID)})
    waits = sorted({max(1, longest * i // GRID) for i in range(1, GRID)})
    tried = {
        Stagger(first, wait): count_steps(kinds, room, Stagger(first, wait))
        for first in firsts
        for wait in waits
    }
    best = min(tried, key=lambda stagger: tried[stagger])
    return best if tried[best] <= (1 - LEAST_GAIN) * usual else None


def count_steps(kinds: Seq[Kind], room: Room, stagger: Stagger | None) -> int:
    """Steps until all have ended, each beginning as early as all that run find their pages.

    Prompts take no steps. Whether one more fits is looked at once a page's steps.
    """
    longest = max(kind.answer for kind in kinds) + 1
    size = sum(kind.count for kind in kinds) * longest + longest  # if they ran one by one
    free = np.full(min(size, 64 * longest), room.pages)
    places = np.full(len(free), room.seqs)
    now, end, begun = 0, 0, 0
    for kind in kinds:
        steps = kind.answer + 1  # its pages come back a step late
        pages = -(-(kind.prompt + np.arange(steps)) // room.page_size)
        left = kind.count
        while left:
            held = stagger is not None and now < stagger.tokens
            most = max(0, stagger.first - begun) if stagger is not None and held else left
            here = slice(now, now + steps)
            fitting = min(left, most, int((free[here] // pages).min()), int(places[here].min()))
            free[here] -= fitting * pages
            places[here] -= fitting
            left, begun = left - fitting, begun + fitting
            end = max(end, now + steps) if fitting else end
            if left:
                now = stagger.tokens if stagger is not None and held else now + room.page_size
            if now + longest > len(free):
                free = np.append(free, np.full(len(free), room.pages))
                places = np.append(places, np.full(len(places), room.seqs))
    return end


def _some_of(kinds: Seq[Kind], most: int) -> list[Kind]:
    some: list[Kind] = []
    for kind in kinds:
        count = min(kind.count, most - sum(one.count for one in some))
        if count:
            some.append(Kind(kind.prompt, kind.answer, count))
    return some
