"""Steps that fill a padded size: the last prompt chunk is cut where that saves padding."""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import replace

from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import OutputKind
from jaxpaged.core.plan import PlanDraft
from jaxpaged.core.policies import Policy
from jaxpaged.core.reuse import Claimed, PageReuse
from jaxpaged.core.sequence import Sequence

# padding that a cut must save, in tokens that it puts off: these take room in a later step
LEAST_SAVED = 0.5


def filled(before: int, q_len: int, sizes: Seq[int]) -> int:
    """Tokens of a step's last row that fill one of the `sizes`, ascending; `q_len` if not cut.

    A row without others `before` it is not cut: it would take two steps by itself.
    """
    num_tokens = before + q_len
    i = bisect_left(sizes, num_tokens)
    if not before or not 0 < i < len(sizes):
        return q_len
    put_off, padding = num_tokens - sizes[i - 1], sizes[i] - num_tokens
    if put_off >= q_len or padding <= LEAST_SAVED * put_off:
        return q_len
    return q_len - put_off


class StepFilling:
    """Decides how much of an admitted prompt its first step computes. Owned by the scheduler.

    The first token of a row that is cut comes a step later, so only those are cut whose callers
    wait for the end.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool, reuse: PageReuse, waiting: Policy):
        self._sizes = limits.step_sizes
        self._page_size, self._reuse, self._waiting = pool.page_size, reuse, waiting

    def cut(
        self, seq: Sequence, q_len: int, draft: PlanDraft, claimed: Claimed, *, has_slots: bool
    ) -> int:
        """Of the `q_len` tokens that fit, those to compute now. The sequence has its pages.

        Chunks of longer prompts stay whole, so that those with the same prompt meet at their ends.
        """
        kept = filled(draft.num_tokens, q_len, self._sizes)
        if (
            kept == q_len
            or seq.request.params.output_kind is not OutputKind.FINAL_ONLY
            or seq.num_computed_tokens + q_len < seq.num_known_tokens
            or draft.is_scored  # such steps have other sizes
            or (has_slots and self._waiting and self._next_fits(seq, kept, draft, claimed))
        ):
            return q_len
        return kept

    def _next_fits(self, seq: Sequence, kept: int, draft: PlanDraft, claimed: Claimed) -> bool:
        """Whether another one is admitted after `seq`, or may be once it shares pages with it."""
        after = self._waiting.first()
        if after.num_in_flight:
            return False
        page = slice(seq.num_computed_tokens, seq.num_computed_tokens + self._page_size)
        if after.token_ids[page] == seq.token_ids[page]:
            return True
        claimed = self._reuse.claimed([seq], claimed)
        if self._reuse.fits_unshared(after, claimed):
            return True
        then = replace(draft, num_tokens=draft.num_tokens + kept)
        return self._reuse.find_fitting(after, then, claimed)[1] > 0
