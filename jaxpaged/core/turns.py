"""Who is in the next step, where steps go through stages of devices one behind the other."""

from collections.abc import Sequence as Seq

from jaxpaged.core.plan import PlanDraft, RowColumns
from jaxpaged.core.sequence import Sequence


class Turns:
    """Lets running sequences take turns, so that as many steps as there are stages share no row.

    A decode needs the token of its last step, which comes out of the last stage. Steps take equal
    parts of the decodes, and each is in every so-manieth; prompts wait for nothing and are in every
    step. Whose tokens were all read may come at once. Owned by the scheduler.
    """

    def __init__(self, num_stages: int):
        self._num_stages, self._step, self._rows = num_stages, 0, RowColumns()

    def choose(self, draft: PlanDraft) -> Seq[Sequence]:
        """Those of the running sequences whose turn it is, by policy."""
        if self._num_stages == 1:
            return draft.order
        if self._rows:  # those of the step before, which were not known yet
            self._step += 1
            for seq in self._rows.seqs:
                seq.turn = self._step
        self._rows = draft.rows
        pending = [seq for seq in draft.order if seq.num_computed_tokens < seq.num_needed_tokens]
        num_decodes = sum([seq.num_pending_tokens == 1 for seq in pending])
        period = min(self._num_stages, max(num_decodes, 1))
        room, latest = -(-num_decodes // period), self._step + 1 - period
        chosen: list[Sequence] = []
        for seq in pending:
            if seq.num_pending_tokens == 1:
                waits = seq.num_in_flight and (seq.turn > latest or seq.needs_read_tokens)
                if waits or not room:
                    continue
                room -= 1
            chosen.append(seq)
        return chosen
