"""A step as the scheduler decides it."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from jaxpaged.core.sequence import Sequence

type Sampled = int | Seq[int] | None
"""What a row sampled: a token, those of a row with a draft, None where it is too early."""


class PlannedRow(NamedTuple):
    """One sequence's share of a step: tokens `start : start + q_len` of it."""

    seq: Sequence
    slot: int
    start: int  # num_computed_tokens before the step
    q_len: int
    samples: bool  # the row reaches its last known token, so what it samples is kept
    num_preemptions: int = (
        0  # of the sequence at planning; more at commit means that its pages are gone
    )


@dataclass(eq=False, slots=True)
class RowColumns:
    """The rows of a step, one list a field of `PlannedRow`.

    Columns, because an object for every row and step costs more than all the rest of planning.
    """

    seqs: list[Sequence] = field(default_factory=list[Sequence])
    slots: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=list[int])
    q_lens: list[int] = field(default_factory=list[int])
    samples: list[bool] = field(default_factory=list[bool])
    num_preemptions: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, row: PlannedRow) -> None:
        self.seqs.append(row.seq)
        self.slots.append(row.slot)
        self.starts.append(row.start)
        self.q_lens.append(row.q_len)
        self.samples.append(row.samples)
        self.num_preemptions.append(row.num_preemptions)

    def last_places(self) -> list[int]:
        """Of each row the place of its last token among the step's."""
        return [end - 1 for end in accumulate(self.q_lens)]

    def kept(self, token_ids: np.ndarray) -> Seq[int | None]:
        """What a step sampled, an entry a row: None where it is too early."""
        tokens: list[int] = token_ids[: len(self)].tolist()
        if all(self.samples):
            return tokens
        return [token if yes else None for token, yes in zip(tokens, self.samples, strict=True)]


class PageMove(NamedTuple):
    """A transfer between the page pool and host memory. Moves are made in the order given.

    `out` keeps copies of the pages under `seq_id`; `in` fills the pages with the kept ones from the
    `first` on, and the kept ones are gone; `drop` lets them go. `fill` fills pages, too, 0 standing
    for none, and the kept ones stay. `local_ids` are the pages' local pages, where there are any: 0
    for a page that is moved without.
    """

    kind: Literal["out", "in", "drop", "fill"]
    seq_id: int  # negative where they are no sequence's, but of the prefix cache
    first: int
    page_ids: tuple[int, ...]
    local_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """Which sequences compute how many tokens in a step. Nobody changes its columns.

    `slot_resets` are the slots whose `output_counts` must be set before the step, each with the
    sequence's tokens and the length of its prompt. `drafts` are guessed tokens by row, counted in
    its `q_len`: such a row samples at every token, and all rows of the step are decodes.
    `page_copies` are pairs of pages: before the step the second becomes a copy of the first; no
    page is in both places; `local_copies` are the same of local pages. `page_moves`, to and from
    host memory, come before these.
    """

    columns: RowColumns = field(default_factory=RowColumns)
    slot_resets: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    page_copies: tuple[tuple[int, int], ...] = ()
    page_moves: tuple[PageMove, ...] = ()
    local_copies: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[PlannedRow]) -> "StepPlan":
        columns = RowColumns()
        for row in rows:
            columns.add(row)
        return cls(columns)

    @cached_property
    def rows(self) -> tuple[PlannedRow, ...]:
        c = self.columns
        fields = zip(c.seqs, c.slots, c.starts, c.q_lens, c.samples, c.num_preemptions, strict=True)
        return tuple(map(PlannedRow._make, fields))

    @property
    def num_rows(self) -> int:
        return len(self.columns)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.columns.q_lens)

    @property
    def is_decode_only(self) -> bool:
        return self.num_tokens == self.num_rows

    @property
    def changes_before(self) -> bool:
        """Whether something on the device must be changed before the step starts."""
        return bool(self.slot_resets or self.page_copies or self.page_moves)

    @property
    def wants_prompt_logprobs(self) -> bool:
        c = self.columns
        return any(
            seq.request.params.prompt_logprobs is not None and start < seq.num_prompt_tokens - 1
            for seq, start in zip(c.seqs, c.starts, strict=True)
        )

    def __bool__(self) -> bool:
        return bool(self.columns.seqs)


@dataclass(slots=True)
class PlanDraft:
    """A step while it is being planned.

    `cap` bounds its tokens; `plain_cap` bounds them until a row with prompt logprobs found room.
    """

    cap: int
    plain_cap: int
    most_scored: int  # tokens of a step in which a row wants prompt logprobs
    most_of_one: int  # tokens of one sequence; 0 is no limit
    num_tokens: int = 0
    order: list[Sequence] = field(default_factory=list[Sequence])  # running ones, by policy
    rows: RowColumns = field(default_factory=RowColumns)
    slot_resets: list[tuple[int, tuple[int, ...], int]] = field(
        default_factory=list[tuple[int, tuple[int, ...], int]]
    )
    next: Sequence | None = None  # waiting sequence that was last looked at
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    speculates: bool = False  # rows may be given drafts
    page_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    local_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    has_preempted: bool = False
    left_out_scored: bool = False
    is_scored: bool = False  # a row wants prompt logprobs

    def choose_q_len(self, seq: Sequence, start: int) -> int:
        """Tokens to compute of a sequence from `start` on, 0 or less for none in this step."""
        pending = len(seq.token_ids) + seq.num_in_flight - start
        if start + pending > seq.num_needed_tokens:
            pending = seq.num_needed_tokens - start
        if pending <= 0 or (seq.num_in_flight and seq.needs_read_tokens):
            return 0
        wants_scores = seq.request.params.prompt_logprobs is not None
        if wants_scores and start < seq.num_prompt_tokens - 1:
            cap = min(self.cap, self.most_scored)
            if self.num_tokens >= cap:
                self.left_out_scored = True
                return 0
            self.cap, self.plain_cap, self.is_scored = cap, cap, True
        room = self.plain_cap - self.num_tokens
        if pending == 1:
            return 1 if room > 0 else 0
        return min(pending, room, self.most_of_one or pending)
