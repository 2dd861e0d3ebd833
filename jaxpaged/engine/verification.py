"""Which guesses of a step were right: from a result with an entry a token to one an entry a row."""

from dataclasses import dataclass, replace

import numpy as np

from jaxpaged.core.plan import Sampled, StepPlan
from jaxpaged.core.speculation import count_right
from jaxpaged.engine.runner import StepResult


@dataclass(frozen=True)
class Verified:
    """What the rows with drafts gave: up to the first wrong guess, and the token in its place."""

    token_ids: dict[int, list[int]]  # by row
    logprobs: dict[int, list[float]]
    num_guessed: int

    def sampled(self, plan: StepPlan, result: StepResult) -> list[Sampled]:
        """Of every row of the plan, as the scheduler takes it."""
        token_ids: list[Sampled] = result.token_ids.tolist()
        return [self.token_ids.get(i, token_ids[i]) for i in range(plan.num_rows)]

    def after_first(self, i: int, num_kept: int) -> list[float]:
        """The logprobs of the tokens after the first that row `i` keeps of its step."""
        return self.logprobs.get(i, [])[1:num_kept]


def verify(plan: StepPlan, result: StepResult) -> tuple[StepResult, Verified]:
    """Compare each draft with what was sampled at its places.

    The result's entries become those of the rows' first tokens; a row is finite where all its kept
    tokens are.
    """
    # where the device made the drafts, the plan has only their lengths
    firsts = np.cumsum([0, *plan.columns.q_lens])[:-1]
    token_ids, logprobs = dict[int, list[int]](), dict[int, list[float]]()
    is_finite = result.is_finite[firsts]
    for i, drafted in plan.drafts.items():
        first = int(firsts[i])
        if result.guessed is not None:
            drafted = result.guessed[first + 1 : first + 1 + len(drafted)].tolist()
        sampled: list[int] = result.token_ids[first : first + len(drafted) + 1].tolist()
        end = first + 1 + count_right(drafted, sampled)
        token_ids[i] = sampled[: end - first]
        logprobs[i] = result.logprobs[first:end].tolist()
        is_finite[i] = result.is_finite[first:end].all()
    rows = {"token_ids": result.token_ids[firsts], "logprobs": result.logprobs[firsts]}
    if len(result.ranks):
        names = ("target_logprobs", "ranks", "top_ids", "top_logprobs")
        rows |= {name: getattr(result, name)[firsts] for name in names}
    num_guessed = sum([len(drafted) for drafted in plan.drafts.values()])
    found = Verified(token_ids, logprobs, num_guessed)
    return replace(result, is_finite=is_finite, **rows), found
