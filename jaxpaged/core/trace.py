"""What the scheduler did with the sequences whose requests asked for it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.plan import PlanDraft
from jaxpaged.core.sequence import SeqState, Sequence

# what a waiting sequence waits for: its place in the line, a free slot (max_num_seqs), tokens of
# the step (max_num_batched_tokens), pages, or the end of a step in which others were preempted
type WaitCause = Literal["line", "slots", "tokens", "pages", "preemption"]

MAX_RUNS = 1024


@dataclass(slots=True)
class Trace:
    """One sequence's plans. Owned by the scheduler, which forgets it when told."""

    seq: Sequence
    waits: Counter[WaitCause] = field(default_factory=Counter[WaitCause])  # in plans
    q_lens: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    # (tokens, for so many steps in a row); the first MAX_RUNS of them
    first_missed_page: int | None = None  # of the prompt, in the prefix cache; None: none yet
    why_missed: str = ""

    def ran(self, q_len: int) -> None:
        if self.q_lens and self.q_lens[-1][0] == q_len:
            self.q_lens[-1] = (q_len, self.q_lens[-1][1] + 1)
        elif len(self.q_lens) < MAX_RUNS:
            self.q_lens.append((q_len, 1))

    def began(self, page_size: int, limits: SchedulerLimits) -> None:
        """Its first plan: say how far the prefix cache helped."""
        seq, params = self.seq, self.seq.request.params
        self.first_missed_page = seq.num_cached_tokens // page_size
        if not limits.enable_prefix_caching:
            self.why_missed = "prefix caching is off"
        elif params.skip_reading_prefix_cache:
            self.why_missed = "the request asked not to read the prefix cache"
        elif params.prompt_logprobs is not None:
            self.why_missed = "prompt_logprobs need every token computed"
        elif self.first_missed_page >= (seq.num_prompt_tokens - 1) // page_size:
            self.why_missed = "none was missed: the last token is always computed"
        else:
            self.why_missed = "not there: never computed with this salt, or evicted since"


def wait_cause(draft: PlanDraft, *, has_slots: bool) -> WaitCause:
    """Why a plan admitted nobody further."""
    if draft.has_preempted:
        return "preemption"
    if not has_slots:
        return "slots"
    return "tokens" if draft.num_tokens >= draft.cap else "pages"


def note_plan(
    traces: Mapping[int, Trace],
    draft: PlanDraft,
    cause: WaitCause,
    page_size: int,
    limits: SchedulerLimits,
) -> None:
    """Add a plan to the traces. A sequence behind the first one waits for its place in the line."""
    first = draft.next
    q_lens = {seq.seq_id: n for seq, n in zip(draft.rows.seqs, draft.rows.q_lens, strict=True)}
    for seq_id, trace in traces.items():
        if seq_id in q_lens:
            if trace.first_missed_page is None:
                trace.began(page_size, limits)
            trace.ran(q_lens[seq_id])
        elif trace.seq.state not in (SeqState.RUNNING, SeqState.FINISHED):
            is_behind = first is not None and first.seq_id not in q_lens and first is not trace.seq
            trace.waits["line" if is_behind else cause] += 1
