"""Work in the background, under any policy: behind all that is live, and the first to give way."""

from collections.abc import Callable, Iterable, Iterator

from jaxpaged.core.plan import RowColumns
from jaxpaged.core.policies import BACKGROUND, FirstCome, Policy, PolicyName, make_policy
from jaxpaged.core.sequence import Sequence


def make_layers(name: PolicyName, num_uncached: Callable[[Sequence], int]) -> Policy:
    """A policy for live sequences, and below it those in the background, first come first."""
    return _Layers(make_policy(name, num_uncached))


class _Layers:
    """Two lines. As long as nothing is in the background it adds no work for a row."""

    def __init__(self, live: Policy):
        self._live, self._behind = live, FirstCome()
        self._has_background = False  # among the running or the waiting

    def __len__(self) -> int:
        return len(self._live) + len(self._behind)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._live
        yield from self._behind

    def add(self, seq: Sequence) -> None:
        self._line(seq).add(seq)

    def put_back(self, seq: Sequence) -> None:
        self._line(seq).put_back(seq)

    def remove(self, seq: Sequence) -> None:
        self._line(seq).remove(seq)

    def first(self) -> Sequence:
        return (self._live if len(self._live) else self._behind).first()

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        if not self._has_background:
            return self._live.in_order(running)
        live, behind = list[Sequence](), list[Sequence]()
        for seq in running:
            (behind if _is_background(seq) else live).append(seq)
        self._has_background = bool(behind or len(self._behind))
        return self._live.in_order(live) + behind

    def served(self, rows: RowColumns) -> None:
        self._live.served(rows)

    def _line(self, seq: Sequence) -> Policy:
        if not _is_background(seq):
            return self._live
        self._has_background = True
        return self._behind


def _is_background(seq: Sequence) -> bool:
    return seq.request.priority >= BACKGROUND
