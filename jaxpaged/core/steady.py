"""Rows that come again in the next step, each one token further: not made anew one by one."""

from collections.abc import Sequence as Seq
from itertools import compress

import numpy as np

from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import PlanDraft, RowColumns
from jaxpaged.core.sequence import SeqState, Sequence


class SteadyRows:
    """The decodes at the head of the order. Owned by the scheduler.

    While the same sequences stand there, each gets its row again; only those are looked at that
    need a page or have all their tokens planned. What comes out is what looking at each would give:
    where pages are short, nothing is planned here.
    """

    def __init__(self, pool: PagePool, local: LocalPages | None):
        self._pool, self._page_size, self._local = pool, pool.page_size, local
        self._seqs: list[Sequence] = []
        self._slots: list[int] = []
        self._num_preemptions: list[int] = []
        self._starts = np.zeros(0, np.int64)  # of their next rows
        self._ends = np.zeros(0, np.int64)  # starts from which on they must be looked at
        self._has_left = False

    def leave(self) -> None:
        """A running sequence gives its pages back."""
        self._has_left = True

    def plan(self, draft: PlanDraft, order: Seq[Sequence]) -> int:
        """Begin a plan with the rows of the first sequences in `order`; returns how many these are.

        A sequence whose tokens are all planned gets none.
        """
        if self._has_left:
            self._keep([*map(_is_as_before, self._seqs, self._num_preemptions)])
            self._has_left = False
        seqs, starts = self._seqs, self._starts
        due: list[int] = np.flatnonzero(starts >= self._ends).tolist()
        needy = [i for i in due if starts[i] < seqs[i].num_needed_tokens]
        if (
            draft.speculates
            or len(seqs) > draft.plain_cap
            or len(needy) > self._pool.room
            or order[: len(seqs)] != seqs
        ):
            self._keep([False] * len(seqs))
            return 0
        for i in needy:
            self._grow(i)
        has_row = np.ones(len(seqs), bool)
        if len(needy) < len(due):
            has_row[due], has_row[needy] = False, True
        self._write_rows(draft.rows, has_row.tolist())
        draft.num_tokens = len(draft.rows)
        for seq in draft.rows.seqs:
            seq.num_computed_tokens += 1
            seq.num_in_flight += 1
        self._starts = starts + has_row
        return len(seqs)

    def add_row(self, draft: PlanDraft, seq: Sequence) -> bool:
        """The next row of a sequence that stands elsewhere, if it is a decode within its last page.

        False, and nothing done, for any other: those are rows that have more to be looked at.
        """
        start, rows = seq.num_computed_tokens, draft.rows
        if (
            len(seq.token_ids) + seq.num_in_flight - start != 1
            or start <= seq.num_prompt_tokens
            or start >= len(seq.page_ids) * self._page_size
            or start >= seq.num_needed_tokens
            or seq.needs_read_tokens
            or seq.slot is None
            or draft.num_tokens >= draft.plain_cap
            or (self._local is not None and self._local.is_behind(seq, start))
        ):
            return False
        rows.seqs.append(seq)
        rows.slots.append(seq.slot)
        rows.starts.append(start)
        rows.q_lens.append(1)
        rows.samples.append(True)
        rows.num_preemptions.append(seq.num_preemptions)
        draft.num_tokens += 1
        seq.num_computed_tokens = start + 1
        seq.num_in_flight += 1
        return True

    def learn(self, rows: RowColumns, first: int, order: Seq[Sequence]) -> None:
        """Take in the decodes among the rows from the `first` on, while they stand as in `order`,
        the sequences behind those that are here already.
        """
        starts: list[int] = []
        for i, seq in zip(range(first, len(rows)), order, strict=False):
            start = rows.starts[i]
            is_decode = rows.q_lens[i] == 1 and rows.samples[i] and start > seq.num_prompt_tokens
            if rows.seqs[i] is not seq or not is_decode or seq.needs_read_tokens:
                break
            starts.append(start + 1)
        if not starts:
            return
        new = slice(first, first + len(starts))
        self._seqs += rows.seqs[new]
        self._slots += rows.slots[new]
        self._num_preemptions += rows.num_preemptions[new]
        self._starts = np.append(self._starts, starts)
        self._ends = np.append(self._ends, [self._end(seq) for seq in rows.seqs[new]])

    def _write_rows(self, rows: RowColumns, has_row: Seq[bool]) -> None:
        rows.seqs = [*compress(self._seqs, has_row)]
        rows.slots = [*compress(self._slots, has_row)]
        rows.starts = [*compress(self._starts.tolist(), has_row)]
        rows.num_preemptions = [*compress(self._num_preemptions, has_row)]
        rows.q_lens, rows.samples = [1] * len(rows), [True] * len(rows)

    def _grow(self, i: int) -> None:
        """Give a row the page that its next token goes to."""
        seq = self._seqs[i]
        if self._local is not None:
            self._local.move_on(seq, int(self._starts[i]))
        seq.page_ids += self._pool.take(1)
        self._ends[i] = self._end(seq)

    def _end(self, seq: Sequence) -> int:
        return min(len(seq.page_ids) * self._page_size, seq.num_needed_tokens)

    def _keep(self, stays: list[bool]) -> None:
        """Forget all but some of the rows."""
        self._seqs = [*compress(self._seqs, stays)]
        self._slots = [*compress(self._slots, stays)]
        self._num_preemptions = [*compress(self._num_preemptions, stays)]
        self._starts, self._ends = self._starts[stays], self._ends[stays]


def _is_as_before(seq: Sequence, num_preemptions: int) -> bool:
    return seq.state is SeqState.RUNNING and seq.num_preemptions == num_preemptions
