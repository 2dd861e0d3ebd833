"""How much a step may take, where a sequence ends, and what must hold in between."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.policies import PolicyName
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.errors import ConfigError, InvariantError


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What a step and a sequence may take at most; lengths in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool
    long_prefill_token_threshold: int  # most tokens of one sequence in a step; 0: no limit
    max_num_scored_tokens: int = 256  # most tokens of a step in which a row wants prompt logprobs
    reserve_full_prompt: bool  # admit a sequence only when all its known tokens find pages
    reserve_whole_answer: bool = False  # and all it may sample too: nothing is ever preempted
    scheduling_policy: PolicyName = "fcfs"
    speculation: Speculation | None = None  # None drafts nothing

    def __post_init__(self):
        for f in fields(self):
            if f.name in ("scheduling_policy", "speculation"):
                continue
            least = 0 if f.type is bool or f.name == "long_prefill_token_threshold" else 1
            if getattr(self, f.name) < least:
                raise ConfigError(f"{f.name} is {getattr(self, f.name)}, must be {least} or more")

    @property
    def reserves(self) -> bool:
        """Admission looks at more pages than a sequence's first step needs."""
        return self.reserve_full_prompt or self.reserve_whole_answer

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
    for seqs, state in ((running, SeqState.RUNNING), (waiting, SeqState.WAITING)):
        for seq in seqs:
            if seq.state is not state or (state is SeqState.WAITING and seq.page_ids):
                raise InvariantError(
                    f"sequence {seq.seq_id} is {seq.state.value} with "
                    f"{len(seq.page_ids)} pages among the {state.value} ones"
                )
