"""Who is admitted next, and who gives way: the four scheduling policies.

A policy owns the line of waiting sequences and orders the running ones. It knows no clock: time is
counted in prompt tokens that have arrived, so the same events give the same order again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Literal, Protocol

from jaxpaged.core.plan import RowColumns
from jaxpaged.core.sequence import Sequence

type PolicyName = Literal["fcfs", "priority", "fair", "sjf"]
type Rank = tuple[int, ...]  # smaller is sooner

# Requests of this priority or a larger one are in the background, see `background.py`.
BACKGROUND = 2**62
# A token still to compute weighs as much as this many tokens that arrive later: whatever comes
# after them is behind. It bounds how long a long prompt is overtaken, see docs/scheduling.md.
AGEING = 8
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a computed and a sampled token cost a key
_QUANTUM = 4096  # keys whose counters differ by less take no pages from each other
# A running sequence loses rank once in so many tokens of output. With every token, those of like
# age would take each other's pages in turn, and compute all again for a token or two.
_OUTPUT_QUANTUM = 256


class Policy(Protocol):
    """The line of waiting sequences, and an order of the running ones."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, the next one first. Another thread may look, too."""
        ...

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that arrives."""
        ...

    def put_back(self, seq: Sequence) -> None:
        """Queue a preempted sequence again."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the line: it runs, or has finished."""
        ...

    def first(self) -> Sequence:
        """The next one to admit; nobody overtakes it in this step. The line must not be empty."""
        ...

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences, the last to give way first. They come by admission, oldest first."""
        ...

    def served(self, rows: RowColumns) -> None:
        """Take note of what a plan gives whom."""
        ...


class FirstCome:
    """In the order of arrival; what was preempted comes back first, the youngest gives way."""

    def __init__(self):
        self._line: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._line.values()))

    def add(self, seq: Sequence) -> None:
        self._line[seq.seq_id] = seq

    def put_back(self, seq: Sequence) -> None:
        self._line[seq.seq_id] = seq
        self._line.move_to_end(seq.seq_id, last=False)

    def remove(self, seq: Sequence) -> None:
        del self._line[seq.seq_id]

    def first(self) -> Sequence:
        return next(iter(self._line.values()))

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return list(running)

    def served(self, rows: RowColumns) -> None:
        pass


class RankedLine:
    """Sequences by rank, each with the rank it had when it was put in or last looked at."""

    def __init__(self, rank: Callable[[Sequence], Rank]):
        self._rank = rank
        self._heap: list[tuple[Rank, int]] = []  # an entry counts while `_ranks` says the same
        self._ranks: dict[int, Rank] = {}
        self._seqs: OrderedDict[int, Sequence] = OrderedDict()  # the next one to look at first

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        ranked = sorted([(rank, seq_id) for seq_id, rank in list(self._ranks.items())])
        found = [self._seqs.get(seq_id) for _, seq_id in ranked]
        return iter([seq for seq in found if seq is not None])

    def put(self, seq: Sequence) -> None:
        rank = self._rank(seq)
        if self._ranks.get(seq.seq_id) != rank:
            heappush(self._heap, (rank, seq.seq_id))
        self._ranks[seq.seq_id], self._seqs[seq.seq_id] = rank, seq

    def remove(self, seq: Sequence) -> None:
        del self._ranks[seq.seq_id], self._seqs[seq.seq_id]

    def first(self) -> Sequence:
        while self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._seqs[self._heap[0][1]]

    def look_again(self) -> None:
        """Rank one sequence anew, another one with every call."""
        seq_id, seq = next(iter(self._seqs.items()))
        self._seqs.move_to_end(seq_id)
        self.put(seq)


class _Arrivals:
    """Counts the prompt tokens that have arrived, and marks each sequence with their number."""

    def __init__(self):
        self._num_tokens = 0

    def mark(self, seq: Sequence) -> None:
        seq.arrival_mark = self._num_tokens
        self._num_tokens += seq.num_prompt_tokens


class Ranked:
    """`priority` and `sjf`: one line by rank; of the running ones the worst rank gives way."""

    def __init__(self, rank: Callable[[Sequence], Rank], *, looks_again: bool):
        self._line, self._rank = RankedLine(rank), rank
        self._arrivals, self._looks_again = _Arrivals(), looks_again

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, seq: Sequence) -> None:
        self._arrivals.mark(seq)
        self._line.put(seq)

    def put_back(self, seq: Sequence) -> None:
        self._line.put(seq)

    def remove(self, seq: Sequence) -> None:
        self._line.remove(seq)

    def first(self) -> Sequence:
        if self._looks_again:
            self._line.look_again()
        return self._line.first()

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return sorted(running, key=_weight if self._looks_again else self._rank)

    def served(self, rows: RowColumns) -> None:
        pass


class Fair:
    """A counter of served tokens for each API key; the key that got least comes next.

    Virtual token counters, from Sheng et al., "Fairness in Serving Large Language Models" (OSDI
    2024). A key that comes back is lifted to the least counter of those that wait, so that idling
    saves nothing up. Tokens computed again after a preemption are free. Among one key's sequences
    the order is that of arrival, and one that was preempted is behind what arrived while it got
    its output.
    """

    def __init__(self):
        self._lines: dict[str, RankedLine] = {}  # of keys with waiting sequences
        self._counters: dict[str, int] = {}
        self._last_left = ""  # key whose line emptied last
        self._arrivals = _Arrivals()

    def __len__(self) -> int:
        return sum([len(line) for line in self._lines.values()])

    def __iter__(self) -> Iterator[Sequence]:
        for _, line in sorted(self._lines.items(), key=lambda item: self.counter(item[0])):
            yield from line

    def counter(self, key: str) -> int:
        """Weighted tokens served to a key, as far as they count."""
        return self._counters.get(key, 0)

    def add(self, seq: Sequence) -> None:
        self._arrivals.mark(seq)
        key = seq.request.key_name
        if key not in self._lines:
            others = self._lines or (self._last_left,)
            least = min([self.counter(other) for other in others])
            self._counters[key] = max(self.counter(key), least)
        self.put_back(seq)

    def put_back(self, seq: Sequence) -> None:
        key = seq.request.key_name
        if key not in self._lines:
            self._lines[key] = RankedLine(_weight_of_output)
        self._lines[key].put(seq)

    def remove(self, seq: Sequence) -> None:
        key = seq.request.key_name
        self._lines[key].remove(seq)
        if not len(self._lines[key]):
            del self._lines[key]
            self._last_left = key

    def first(self) -> Sequence:
        return self._lines[min(self._lines, key=self._order)].first()

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return sorted(
            running,
            key=lambda seq: (
                self.counter(seq.request.key_name) // _QUANTUM,
                _weight_of_output(seq, _OUTPUT_QUANTUM),
            ),
        )

    def served(self, rows: RowColumns) -> None:
        counters = self._counters
        for seq, start, q_len, samples in zip(
            rows.seqs, rows.starts, rows.q_lens, rows.samples, strict=True
        ):
            if seq.request.priority >= BACKGROUND:
                continue  # takes nothing from anybody
            cost = OUTPUT_WEIGHT if samples else 0
            if start < seq.num_prompt_tokens and not seq.num_preemptions:
                cost += PROMPT_WEIGHT * min(q_len, seq.num_prompt_tokens - start)
            counters[seq.request.key_name] += cost

    def _order(self, key: str) -> tuple[int, Rank]:
        first = self._lines[key].first()
        return self.counter(key), _weight_of_output(first)


def make_policy(name: PolicyName, num_uncached: Callable[[Sequence], int]) -> Policy:
    """A policy by its name.

    Args:
        num_uncached: tokens of a waiting sequence that the prefix cache does not hold.
    """
    if name == "priority":
        return Ranked(_priority, looks_again=False)
    if name == "sjf":
        return Ranked(
            lambda seq: (AGEING * num_uncached(seq) + seq.arrival_mark, seq.seq_id),
            looks_again=True,
        )
    return Fair() if name == "fair" else FirstCome()


def _priority(seq: Sequence) -> Rank:
    return seq.request.priority, seq.arrival_mark, seq.seq_id


def _weight(seq: Sequence) -> Rank:
    """By all its tokens: the longer a running sequence gets, the sooner it gives way."""
    rank, seq_id = _weight_of_output(seq, _OUTPUT_QUANTUM)
    return AGEING * seq.num_prompt_tokens + rank, seq_id


def _weight_of_output(seq: Sequence, quantum: int = 1) -> Rank:
    """By its output in whole quanta: the more it got, the sooner it gives way."""
    num_output_tokens = (len(seq.token_ids) - seq.num_prompt_tokens) // quantum * quantum
    return AGEING * num_output_tokens + seq.arrival_mark, seq.seq_id
