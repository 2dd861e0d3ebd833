"""Pages in host memory: how many are whose, which sequences are swapped, what must be moved."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import PageMove
from jaxpaged.core.sequence import SeqState, Sequence

MOVE_WIDTHS = (8, 64)  # pages that move together; fewer are padded


def _has_none() -> bool:
    return False


class HostTier:
    """Decides what is swapped out and counts host pages. Owned by the scheduler.

    When it is full, prefix pages go (`HostPrefixes`), and then the sequence that was swapped out
    first is dropped: it computes again.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool, local: LocalPages | None):
        self._limits, self._pool, self._local = limits, pool, local
        # swapped ones and their host pages, oldest first
        self._kept: OrderedDict[int, tuple[Sequence, int]] = OrderedDict()
        self._moves: list[PageMove] = []
        self.num_swaps = 0
        self.num_prefix_pages = 0  # padding included, like those of sequences
        self.make_room: Callable[[], bool] = _has_none  # drops prefix pages, if there are any

    @property
    def num_used_pages(self) -> int:
        kept = list(self._kept.values())  # another thread may look, too
        return self.num_prefix_pages + sum([num_pages for _, num_pages in kept])

    @property
    def num_swapped(self) -> int:
        """Sequences in host memory."""
        return len(self._kept)

    @property
    def num_free_pages(self) -> int:
        return self._limits.num_host_pages - self.num_used_pages

    @property
    def has_moves(self) -> bool:
        return bool(self._moves)

    def takes(self, seq: Sequence) -> bool:
        """Swap a sequence out that is being preempted and still holds its pages, if it pays."""
        needed = self._num_pages(seq)
        if not seq.num_computed_tokens or not self._pays(seq, needed):
            return False
        while self.num_free_pages < needed:
            if not self.make_room():
                self._drop_oldest()
        num_pages = self._pool.pages_for(seq.num_computed_tokens)
        self._add_move("out", seq, 0, seq.page_ids[:num_pages])
        self._kept[seq.seq_id] = seq, needed
        self.num_swaps += 1
        return True

    def brings_back(self, seq: Sequence, num_shared: int, num_tokens: int) -> None:
        """A swapped sequence has its new pages; of the first `num_tokens` tokens' pages, those
        after the first `num_shared` must be filled.
        """
        del self._kept[seq.seq_id]
        page_ids = seq.page_ids[num_shared : self._pool.pages_for(num_tokens)]
        self._add_move("in", seq, num_shared, page_ids)

    def forget(self, seq: Sequence) -> None:
        """Let a sequence's host pages go, if it has any."""
        if self._kept.pop(seq.seq_id, None) is not None:
            self._add_move("drop", seq, 0, [])

    def add_move(self, move: PageMove) -> None:
        """To be made after those that are to be made already."""
        self._moves.append(move)

    def take_moves(self) -> tuple[PageMove, ...]:
        """The moves that the plan being made begins with."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def _add_move(
        self, kind: Literal["out", "in", "drop"], seq: Sequence, first: int, page_ids: list[int]
    ) -> None:
        local_ids = () if self._local is None else tuple(self._local.ids(page_ids))
        self.add_move(PageMove(kind, seq.seq_id, first, tuple(page_ids), local_ids))

    def _pays(self, seq: Sequence, needed: int) -> bool:
        mode = self._limits.preemption_mode
        if mode == "recompute" or needed > self._limits.num_host_pages:
            return False
        moved_tokens = needed * self._pool.page_size
        return mode == "swap" or seq.num_computed_tokens * self._limits.swap_gain > moved_tokens

    def _drop_oldest(self) -> None:
        seq, _ = next(iter(self._kept.values()))
        self.forget(seq)
        seq.become(SeqState.WAITING)
        seq.num_computed_tokens = 0

    def _num_pages(self, seq: Sequence) -> int:
        """Host pages that the sequence takes, padding included."""
        num_pages, widest = self._pool.pages_for(seq.num_computed_tokens), MOVE_WIDTHS[-1]
        rest = num_pages % widest
        padded = next(width for width in MOVE_WIDTHS if width >= rest) if rest else 0
        return num_pages - rest + padded
