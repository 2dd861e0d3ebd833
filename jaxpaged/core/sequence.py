"""One stream of tokens and its life."""

import enum
from dataclasses import dataclass, field

from jaxpaged.core.request import Request
from jaxpaged.errors import InvariantError

type Root = tuple[str, str]  # cache salt and adapter
type Parent = int | Root | tuple[int, Root]
"""What a cached page follows: the prefix id of the page before. A first page follows its request's
`cache_root`; one's own page after one that is shared by all follows that one's id and the root."""


class SeqState(enum.Enum):
    WAITING = "waiting"  # holds no pages
    RUNNING = "running"  # holds pages and a slot, takes part in steps
    SWAPPED = "swapped"  # waits; copies of its pages are in host memory
    FINISHED = "finished"  # pages given back; final


# RUNNING -> WAITING or SWAPPED is preemption: the pages go, the tokens stay. SWAPPED -> WAITING is
# the loss of the copies.
_MAY_BECOME: dict[SeqState, frozenset[SeqState]] = {
    SeqState.WAITING: frozenset({SeqState.RUNNING, SeqState.FINISHED}),
    SeqState.RUNNING: frozenset({SeqState.WAITING, SeqState.SWAPPED, SeqState.FINISHED}),
    SeqState.SWAPPED: frozenset({SeqState.WAITING, SeqState.RUNNING, SeqState.FINISHED}),
    SeqState.FINISHED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens being generated. Owned and changed by the scheduler alone.

    The host reads sampled tokens one step late: `num_in_flight` of them are computed or being
    computed on the device and not yet in `token_ids`. All lengths below count them where they say
    `known`.
    """

    seq_id: int
    request: Request
    choice: int  # index among the request's n answers
    token_ids: list[int]  # the prompt, then everything sampled and read
    num_prompt_tokens: int
    page_ids: list[int] = field(default_factory=list[int])  # grows in place; any other change is
    # a new list, which is how the batch builder sees it
    page_hashes: list[bytes] = field(default_factory=list[bytes])  # of leading full pages, if known
    num_computed_tokens: int = 0  # leading tokens whose KV is in pages, after all steps in flight
    num_in_flight: int = 0
    state: SeqState = SeqState.WAITING
    slot: int | None = None  # row in DeviceState while RUNNING
    num_cached_tokens: int = 0  # found in the prefix cache at first admission
    num_host_cached_tokens: int = 0  # of these, the ones that came back from host memory
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_scheduled_time: float | None = None  # seconds, monotonic
    first_token_time: float | None = None
    num_needed_tokens: int = 0  # tokens whose KV is ever needed; set when the scheduler gets it
    num_registered_pages: int = 0  # leading pages whose content the prefix cache has seen
    arrival_mark: int = 0  # set by the scheduling policy
    turn: int = 0  # the latest step that it is in, counted where stages take turns
    prefix: Parent = 0  # the prefix cache's name for the content of those pages
    num_shared_pages: int = 0  # leading pages that others computed
    first_local_page: int = 0  # page from which on it holds local pages too, where there are any
    shared_hashes: list[bytes] = field(default_factory=list[bytes])  # under the salt of all
    needs_read_tokens: bool = field(init=False)  # its next step needs tokens that the host has read
    sampler_level: int = field(init=False)  # greedy, random, masked, full, scores its prompt
    stop_ids: frozenset[int] = field(init=False)  # tokens that may end it

    def __post_init__(self):
        params = self.request.params
        self.needs_read_tokens = bool(self.request.banned_runs)
        self.sampler_level = 2 if params.needs_edits else int(bool(params.temperature))
        if params.needs_full_sampler:
            self.sampler_level = 3
        if params.prompt_logprobs is not None:
            self.sampler_level = 4
        self.stop_ids = self.request.stop_ids

    @property
    def num_known_tokens(self) -> int:
        """Tokens read by the host plus those in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending_tokens(self) -> int:
        """Known but not computed: the rest of a prompt, or the 1 of a decode."""
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, those in flight included."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Sampled tokens that the host has read."""
        return self.token_ids[self.num_prompt_tokens :]

    def become(self, state: SeqState) -> None:
        if state not in _MAY_BECOME[self.state]:
            raise InvariantError(f"sequence {self.seq_id}: {self.state.value} -> {state.value}")
        self.state = state
