"""A step as the scheduler decides it."""

from dataclasses import dataclass
from functools import cached_property

from jaxpaged.core.sequence import Sequence


@dataclass(eq=False, slots=True)
class PlannedRow:
    """One sequence's share of a step: tokens `start : start + q_len` of it.

    Nobody changes it; frozen, it would take several times as long to make, for every row and step.
    """

    seq: Sequence
    slot: int
    start: int  # num_computed_tokens before the step
    q_len: int
    samples: bool  # the row reaches its last known token, so what it samples is kept
    num_preemptions: int = (
        0  # of the sequence at planning; more at commit means that its pages are gone
    )


@dataclass(frozen=True)
class StepPlan:
    """Which sequences compute how many tokens in a step.

    `slot_resets` are the slots whose `output_counts` must be set before the step, each with the
    sequence's tokens and the length of its prompt.
    """

    rows: tuple[PlannedRow, ...]
    slot_resets: tuple[tuple[int, tuple[int, ...], int], ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        return sum([row.q_len for row in self.rows])

    @property
    def is_decode_only(self) -> bool:
        return all(row.q_len == 1 for row in self.rows)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return any(
            row.seq.request.params.prompt_logprobs is not None
            and row.start < row.seq.num_prompt_tokens - 1
            for row in self.rows
        )

    def __bool__(self) -> bool:
        return bool(self.rows)
