"""A step as the scheduler decides it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jaxpaged.core.sequence import Sequence


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


@dataclass(frozen=True)
class StepPlan:
    """Which sequences compute how many tokens in a step. Nobody changes its columns.

    `slot_resets` are the slots whose `output_counts` must be set before the step, each with the
    sequence's tokens and the length of its prompt.
    """

    columns: RowColumns = field(default_factory=RowColumns)
    slot_resets: tuple[tuple[int, tuple[int, ...], int], ...] = ()

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
    num_tokens: int = 0
    order: list[Sequence] = field(default_factory=list[Sequence])  # running ones, by policy
    rows: RowColumns = field(default_factory=RowColumns)
    slot_resets: list[tuple[int, tuple[int, ...], int]] = field(
        default_factory=list[tuple[int, tuple[int, ...], int]]
    )
    next: Sequence | None = None  # waiting sequence that was last looked at
    has_preempted: bool = False
    left_out_scored: bool = False
