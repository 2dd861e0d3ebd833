"""How much a step may take, where a sequence ends, and what must hold in between."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Literal

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.policies import PolicyName
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.errors import ConfigError, InvariantError

type PreemptionMode = Literal["auto", "recompute", "swap"]
type Admission = Literal["foresee", "evict", "no-evict"]
_NOT_COUNTS = (
    *("admission", "scheduling_policy", "speculation", "preemption_mode", "step_sizes"),
    *("swap_gain", "draft_cost", "single_cost"),
)


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What a step and a sequence may take at most; lengths in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one sequence in a step; 0: no limit
    max_num_scored_tokens: int = 256  # most tokens of a step in which a row wants prompt logprobs
    reserve_full_prompt: bool = True  # admit a sequence only when all its known tokens find pages
    # foresee: and when pages will suffice for all that run, as far as lengths can be foretold;
    # no-evict: when they suffice for all that everybody may sample: nothing is ever preempted
    admission: Admission = "foresee"
    scheduling_policy: PolicyName = "fcfs"
    speculation: Speculation | None = None  # None drafts nothing
    num_stages: int = 1  # of devices that a step goes through: so many steps share no decode
    draft_cost: float = 0.0  # time in which a draft model guesses a token, in steps of the model
    single_cost: float = (
        1.0  # of a step with drafts, in decode steps of which a program has several
    )
    preemption_mode: PreemptionMode = "recompute"  # auto: swap where that is estimated cheaper
    num_host_pages: int = 0  # for swapped sequences
    step_sizes: tuple[int, ...] = ()  # tokens of mixed steps, ascending; none: no chunk is cut
    swap_gain: float = 1.0  # time to compute a token over the time to move one out and back in

    def __post_init__(self):
        for f in fields(self):
            if f.name in _NOT_COUNTS:
                continue
            may_be_0 = f.type is bool or f.name in (
                "long_prefill_token_threshold",
                "num_host_pages",
            )
            least = 0 if may_be_0 else 1
            if getattr(self, f.name) < least:
                raise ConfigError(f"{f.name} is {getattr(self, f.name)}, must be {least} or more")
        if list(self.step_sizes) != sorted(self.step_sizes):
            raise ConfigError(f"step_sizes is {self.step_sizes}, must ascend")

    @property
    def reserves(self) -> bool:
        """Admission looks at more pages than a sequence's first step needs."""
        return self.reserve_full_prompt or self.admission == "no-evict"

    def num_reserved_tokens(self, seq: Sequence) -> int:
        """Tokens for which admission looks for pages, where it looks further than a step."""
        if self.admission == "no-evict":
            return seq.num_needed_tokens
        return min(seq.num_known_tokens, seq.num_needed_tokens)

    def num_needed_tokens(self, seq: Sequence) -> int:
        """Tokens whose KV is ever needed: all but the last one that the sequence may sample."""
        max_tokens = seq.request.max_tokens
        if not max_tokens:
            return seq.num_prompt_tokens
        return min(seq.num_prompt_tokens + max_tokens, self.max_model_len) - 1


type StopCause = tuple[str, int | None]


def stop_cause(seq: Sequence) -> StopCause | None:
    """Why a sequence ends with the token just appended: finish reason and stopping token id.

    The token id is None where an end-of-text token or the length ended it; the result is None where
    it goes on.
    """
    params, token = seq.request.params, seq.token_ids[-1]
    if len(seq.token_ids) - seq.num_prompt_tokens > params.min_tokens:
        if token in seq.request.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and token in params.stop_token_ids:
            return "stop", token
    return ("length", None) if len(seq.token_ids) > seq.num_needed_tokens else None


def check_states(
    running: Seq[Sequence], waiting: Seq[Sequence], free_slots: Seq[int], num_slots: int
) -> None:
    """Compare slots and states with where sequences are kept.

    Raises:
        InvariantError: something does not add up.
    """
    slots = [seq.slot for seq in running] + list(free_slots)
    if sorted(slots, key=str) != sorted(range(num_slots), key=str):
        raise InvariantError(f"scheduler: slots {slots} are not each used or free once")
    for seqs, is_running in ((running, True), (waiting, False)):
        for seq in seqs:
            if (seq.state is SeqState.RUNNING) != is_running or (seq.page_ids and not is_running):
                raise InvariantError(
                    f"sequence {seq.seq_id} is {seq.state.value} with {len(seq.page_ids)} pages "
                    f"among the {'running' if is_running else 'waiting'} ones"
                )
            if (seq.state is SeqState.WAITING) and seq.num_computed_tokens:
                raise InvariantError(f"sequence {seq.seq_id} waits with KV that nobody holds")
