"""What keeps a step's temporaries in their place, over an allocator like XLA's."""

import random

from jaxpaged.engine.holes import GRAIN, make_holes

POOL = 1 << 26
TEMPORARIES = 1 << 24


class BestFit:
    """The smallest gap that is large enough, from its beginning; gaps that touch become one."""

    def __init__(self, size: int):
        self.gaps = {0: size}

    def take(self, size: int) -> int:
        size = -(-size // GRAIN) * GRAIN
        start = min((start for start, gap in self.gaps.items() if gap >= size), key=self.gaps.get)
        gap = self.gaps.pop(start)
        if gap >= 2 * size:  # what is left over is given to others
            self.gaps[start + size] = gap - size
            gap = size
        self.sizes = getattr(self, "sizes", {}) | {start: gap}
        return start

    def give(self, start: int) -> None:
        self.gaps[start] = self.sizes.pop(start)
        for start in sorted(self.gaps, reverse=True):
            end = start + self.gaps[start]
            if end in self.gaps:
                self.gaps[start] += self.gaps.pop(end)


class Placed:
    def __init__(self, allocator: BestFit, size: int):
        self._allocator, self._start = allocator, allocator.take(size)

    def unsafe_buffer_pointer(self) -> int:
        return self._start

    def delete(self) -> None:
        self._allocator.give(self._start)


def places_of_temporaries(allocator: BestFit, words: int) -> set[int]:
    """Over some steps, whose words and results go back one or two steps later, as it happens."""
    lags, places = random.Random(0), set[int]()
    waiting: list[tuple[int, int]] = []  # the step that gives it back, and where it is
    for step in range(100):
        sizes = words, 12 * GRAIN
        waiting += [(step + lags.randint(1, 2), allocator.take(size)) for size in sizes]
        temporaries = allocator.take(TEMPORARIES)
        places.add(temporaries)
        allocator.give(temporaries)
        for _, start in [one for one in waiting if one[0] <= step]:
            allocator.give(start)
        waiting = [one for one in waiting if one[0] > step]
    return places


def test_temporaries_stay_where_they_are_beside_holes_for_a_steps_words():
    for words in (1000, 74_000, 400_000):
        allocator = BestFit(POOL)
        walls = make_holes(lambda size, a=allocator: Placed(a, size), 400_000)
        assert len(places_of_temporaries(allocator, words)) == 1
        assert len(walls) >= 4


def test_without_holes_they_move():
    assert len(places_of_temporaries(BestFit(POOL), 74_000)) > 1


def test_older_gaps_are_filled_with_walls_before_one_stands_beside_its_hole():
    allocator = BestFit(POOL)
    starts = [allocator.take(GRAIN) for _ in range(20)]
    for start in starts[::2]:
        allocator.give(start)
    make_holes(lambda size: Placed(allocator, size), 400_000)
    assert len(places_of_temporaries(allocator, 74_000)) == 1
