"""What steps take with drafts and without, by the clock, against what the figures say.

Times come in with what steps sampled: a replay sees those of the run.
"""

from jaxpaged.core.plan import StepPlan
from jaxpaged.core.speculation import ALL_WAIT, BESIDE_OTHERS, draft_cost

FORGET = 1 / 512  # of what is known of drafts, with each plain step: some day they are tried again
NEW, OUTLIER = 0.3, 2.0  # weight of a new time; one that is longer by more is cut to this


class DraftPace:
    """Of batches of about one size, how much longer steps with drafts take than was reckoned.

    Args:
        single_cost: what is taken for that before it is known.
    """

    def __init__(self, single_cost: float, guess_cost: float):
        self._unknown, self._guess_cost = single_cost, guess_cost
        self._plain: dict[int, float] = {}  # seconds of a plain step, by size of the batch
        self._single_costs: dict[int, float] = {}
        self._plain_rows = 0  # of the step before, where that was a plain one
        self._seconds, self._num_steps = 0.0, 0  # since the last step with drafts

    def single_cost(self, num_rows: int) -> float:
        """Of a step by itself, in steps as they are where nobody drafts."""
        return self._single_costs.get(num_rows.bit_length(), self._unknown)

    def took(self, plan: StepPlan, seconds: float, num_running: int) -> None:
        """Take in how long after the step before it a step was read; 0 is not known."""
        size, num_rows = plan.num_rows.bit_length(), plan.num_rows
        self._seconds += seconds
        self._num_steps += 1
        if plan.drafts:
            # one more in between: of rows that need not wait
            if size in self._plain and seconds and self._num_steps <= 2:
                self._took_drafts(plan, num_running)
            self._seconds, self._num_steps, self._plain_rows = 0.0, 0, 0
            return
        if not plan.is_decode_only or not seconds:
            self._plain_rows = 0
            return
        if num_rows == self._plain_rows:
            _learn(self._plain, size, seconds)
            if size in self._single_costs:
                self._single_costs[size] += FORGET * (self._unknown - self._single_costs[size])
        self._plain_rows = num_rows

    def _took_drafts(self, plan: StepPlan, num_running: int) -> None:
        """A step with drafts that follows another one."""
        size, num_rows = plan.num_rows.bit_length(), plan.num_rows
        lengths = [len(drafted) for drafted in plan.drafts.values()]
        wait = ALL_WAIT if len(lengths) == num_rows else BESIDE_OTHERS
        reckoned = draft_cost(wait, num_rows, sum(lengths)) + self._guess_cost * max(lengths)
        of_all_rows = self._seconds * max(num_running, num_rows) / num_rows
        self._single_costs.setdefault(size, self._unknown)
        _learn(self._single_costs, size, of_all_rows / (self._plain[size] * reckoned))


def _learn(known: dict[int, float], size: int, new: float) -> None:
    old = known.setdefault(size, new)
    known[size] += NEW * (min(new, OUTLIER * old) - old)
