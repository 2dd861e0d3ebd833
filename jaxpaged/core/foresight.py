"""Whether pages suffice for all that run until the last of them has ended, as far as can be told.

The idea is known as past-future scheduling: Gong et al., "Past-Future Scheduler for LLM Serving
under SLA Guarantees" (ASPLOS 2025).
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.policies import BACKGROUND
from jaxpaged.core.sequence import Sequence

HISTORY, FEWEST = 256, 32  # answers whose lengths are kept, and so many that some are foretold
# Each sequence has its own place among the answers that are longer than its own: multiples of the
# golden ratio, without the whole part, are spread evenly wherever one begins to count. The first
# places are left out: what is recomputed where one guesses low costs more than pages left empty.
_GOLDEN, LEAST_PLACE = (5**0.5 - 1) / 2, 0.15
_KNOWN = -1.0  # stands for a place where nothing can end the answer before its max_tokens
_LATE = 1  # steps after a sequence's last row in which it still holds its pages: until that is read


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Sequences by the steps that they still take. One whose end is not foretold does not grow."""

    ends: np.ndarray  # steps from now until its pages come back
    missing: np.ndarray  # tokens that do not fit into its pages, below 0 where there is room
    freed: np.ndarray  # pages that come back with its end, of those that it holds now
    num_constant: int  # pages that those without an end need beyond what they hold
    rank: int = 0  # of those who count; who has a larger one gives way

    def __add__(self, other: "_Outlook") -> "_Outlook":
        return _Outlook(
            np.append(self.ends, other.ends),
            np.append(self.missing, other.missing),
            np.append(self.freed, other.freed),
            self.num_constant + other.num_constant,
            self.rank,
        )

    def most_needed(self, page_size: int) -> int:
        """Most pages that are needed at any time beyond those held now.

        Between two ends everybody grows by a token a step, so only the moments before ends count.
        """
        if not len(self.ends):
            return self.num_constant
        order = np.argsort(-self.ends, kind="stable")
        ends, missing, freed = self.ends[order], self.missing[order], self.freed[order]
        # of those that still run when one ends, the pages for `missing + end` tokens, rounded up
        # for each: whole pages apart, they differ in whether the rests make one page more
        whole, rest = np.divmod(missing, page_size)
        more = np.cumsum(rest[:, None] > np.arange(page_size), axis=0)
        num_running = np.arange(1, len(ends) + 1)
        grown = np.cumsum(whole) + num_running * -(-ends // page_size)
        grown += more[num_running - 1, -ends % page_size]
        ended = freed.sum() - np.cumsum(freed)
        return self.num_constant + int((grown - ended).max())


class Foresight:
    """Foretells how long answers get, and whether one more finds its pages. Owned by `PageReuse`.

    A length is known where nothing can end the answer early. Others are taken to be as long as one
    of the answers of late that are longer than what there is of them, each sequence another one;
    where there are too few of these, the sequence is taken to stay as it is. Who would give way
    to a waiting sequence in any case does not count for it, nor do the pages that it holds alone.

    Args:
        by_priority: a larger priority gives way to a smaller one; else the background alone does.
    """

    def __init__(self, pool: PagePool, *, by_priority: bool = False):
        self._pool, self._by_priority = pool, by_priority
        self._running: dict[int, Sequence] = {}
        self._places: dict[int, float] = {}  # of the same ones, in the same order
        self._num_longest = 0  # pages of those that run, each as long as it may get
        self._lengths = deque[int](maxlen=HISTORY)  # of answers, in tokens
        self._by_length: list[int] = []  # the same, ascending
        self._outlook: _Outlook | None = None  # for those that run, in this plan
        self._refused: tuple[int, int] | None = None  # one that need not be looked at again now
        self._num_plans = 0  # since it was refused

    def enter(self, seq: Sequence) -> None:
        """A sequence has been given its pages."""
        self._running[seq.seq_id] = seq
        place = self._places[seq.seq_id] = _place(seq)
        self._num_longest += self._pool.pages_for(seq.num_needed_tokens)
        if self._outlook is not None:
            self._outlook += self._look([seq], [place], [seq.num_known_tokens], [len(seq.page_ids)])

    def leave(self, seq: Sequence) -> None:
        """A sequence gives its pages back."""
        del self._running[seq.seq_id], self._places[seq.seq_id]
        self._num_longest -= self._pool.pages_for(seq.num_needed_tokens)
        self._outlook = self._refused = None

    def finishing(self, seq: Sequence, reason: str) -> None:
        """A sequence that ran ends; its length is kept, if it was not known before."""
        if reason not in ("stop", "length") or self._places[seq.seq_id] == _KNOWN:
            return
        if len(self._lengths) == HISTORY:
            self._by_length.remove(self._lengths[0])
        self._lengths.append(len(seq.token_ids) - seq.num_prompt_tokens)
        insort(self._by_length, self._lengths[-1])

    def end_plan(self) -> None:
        """Everybody gets on with the step."""
        self._outlook = None
        self._num_plans += 1
        if self._num_plans >= self._pool.page_size:
            self._refused = None

    def fits(self, seq: Sequence, shared: Seq[int]) -> bool:
        """Whether a waiting sequence, with cached pages to share, never leaves too few for others.

        It does where nobody runs who counts. One that was refused is not looked at again before
        somebody leaves, it finds other pages, or it has waited as long as a page lasts: by so much
        less it will have grown when those that run end.
        """
        pool, running = self._pool, self._running
        longest = self._num_longest + pool.pages_for(seq.num_needed_tokens)
        if not running or pool.num_held + longest <= pool.num_usable:
            return True
        if self._refused == (seq.seq_id, len(shared)):
            return False
        rank = self._rank(seq)
        if self._outlook is None or self._outlook.rank != rank:
            self._outlook = self._look_at_running(rank)
            if self._outlook is None:
                return True
        one = self._look([seq], [_place(seq)], [seq.num_known_tokens], [len(shared)])
        outlook = self._outlook + one
        num_held = pool.num_held + pool.num_free_among(shared)
        fits = num_held + outlook.most_needed(pool.page_size) <= pool.num_usable
        if not fits:
            self._refused, self._num_plans = (seq.seq_id, len(shared)), 0
        return fits

    def _rank(self, seq: Sequence) -> int:
        priority = seq.request.priority
        return min(priority, BACKGROUND) if self._by_priority else int(priority >= BACKGROUND)

    def _look_at_running(self, rank: int) -> _Outlook | None:
        """How those get on who do not give way to this rank; None where there are none."""
        counted, places, num_given = list[Sequence](), list[float](), 0
        for seq, place in zip(self._running.values(), self._places.values(), strict=True):
            if self._rank(seq) > rank:
                num_given += len(seq.page_ids) - self._pool.num_shared(seq.page_ids)
            else:
                counted.append(seq)
                places.append(place)
        if not counted:
            return None
        num_done, num_pages = [*map(_num_done, counted)], [len(seq.page_ids) for seq in counted]
        outlook = self._look(counted, places, num_done, num_pages)
        return replace(outlook, num_constant=outlook.num_constant - num_given, rank=rank)

    def _look(
        self, seqs: Seq[Sequence], places: Seq[float], num_done: Seq[int], num_pages: Seq[int]
    ) -> _Outlook:
        """How these get on with so many tokens done after this step, and the pages they have."""
        pool, page_size, done = self._pool, self._pool.page_size, np.array(num_done)
        ends = self._ends(seqs, np.array(places), done) - done
        missing = done - np.array(num_pages) * page_size
        freed = np.array([len(seq.page_ids) - pool.num_shared(seq.page_ids) for seq in seqs])
        grows = ends >= 0
        constant = np.maximum(-(-missing[~grows] // page_size), 0).sum()
        missing = np.maximum(missing, 1 - page_size)  # pages of guesses are no room for later
        return _Outlook(ends[grows] + _LATE, missing[grows], freed[grows], int(constant))

    def _ends(self, seqs: Seq[Sequence], places: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Tokens whose KV each will have needed in the end; fewer than done where none can tell."""
        ends = np.array([seq.num_needed_tokens for seq in seqs])
        is_unknown = places != _KNOWN
        if not is_unknown.any():
            return ends
        if len(self._lengths) < FEWEST:
            return np.where(is_unknown, -1, ends)
        lengths, prompts = np.array(self._by_length), [seq.num_prompt_tokens for seq in seqs]
        first = np.searchsorted(lengths, done - prompts, "right")
        num_longer = len(lengths) - first
        index = np.minimum(first + (places * num_longer).astype(np.int64), len(lengths) - 1)
        return np.where(is_unknown, np.minimum(ends, prompts + lengths[index] - 1), ends)


def _num_done(seq: Sequence) -> int:
    """Computed tokens of a running sequence; of a prompt in chunks, the rest is taken for done."""
    num_known, num_computed = len(seq.token_ids) + seq.num_in_flight, seq.num_computed_tokens
    return num_known if num_known - num_computed > 1 else num_computed


def _place(seq: Sequence) -> float:
    """A sequence's place among longer answers, 0 being that of the shortest; or `_KNOWN`."""
    if seq.request.has_known_length:
        return _KNOWN
    return LEAST_PLACE + (1 - LEAST_PLACE) * (seq.seq_id * _GOLDEN % 1.0)
