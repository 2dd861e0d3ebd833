"""Who computes how much in the next step, who waits, who must give way."""

import time
from collections.abc import Sequence as Seq

from jaxpaged.core.limits import SchedulerLimits, StopCause, check_states, stop_cause
from jaxpaged.core.logit_edits import check_edits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import PlanDraft, PlannedRow, Sampled, StepPlan
from jaxpaged.core.policies import make_policy
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.core.speculator import Speculator, take_verified
from jaxpaged.core.trace import Trace, WaitCause, note_plan, wait_cause
from jaxpaged.errors import InvariantError, PromptTooLong, RequestError


class Scheduler:
    """One loop in which prefill and decode are the same; a policy says who is next.

    The engine plans a step before it commits the one before: `schedule` counts a step's tokens as
    computed at once, `commit` appends what was sampled. Not safe for use by several threads.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool, cache: PrefixCache):
        self.limits, self.pool, self.cache = limits, pool, cache
        self.num_preemptions = 0
        self._running: dict[int, Sequence] = {}  # by seq_id, oldest first
        self._waiting = make_policy(limits.scheduling_policy, self._num_uncached)
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._scored_was_left_out = False
        self.wait_cause: WaitCause = "line"  # why the last plan admitted nobody further
        self.traces: dict[int, Trace] = {}  # by seq_id, of those that are to be explained
        self._speculator = Speculator(limits.speculation)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold pages, oldest first."""
        return list(self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of all waiting sequences; costs a walk over them."""
        return sum([len(seq.token_ids) for seq in self._waiting])

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence where the policy puts it.

        Raises:
            RequestError: it could never run, even alone.
        """
        request, limits = seq.request, self.limits
        sampled = min(request.max_tokens, 1)
        if seq.num_prompt_tokens + sampled > limits.max_model_len:
            raise PromptTooLong(seq.num_prompt_tokens, sampled, limits.max_model_len)
        check_edits(request)
        seq.num_needed_tokens = limits.num_needed_tokens(seq)
        needed = self.pool.pages_for(seq.num_needed_tokens)
        if needed > self.pool.num_usable:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens, max_tokens {request.max_tokens}: need "
                f"{needed} pages of {self.pool.page_size} tokens, the pool has "
                f"{self.pool.num_usable}: shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        self._waiting.add(seq)

    def abort(self, seq: Sequence) -> None:
        """Finish a sequence that nobody waits for any more."""
        self.finish(seq, "abort", None)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None) -> None:
        """End a sequence now and give its pages back; steps in flight for it are ignored later.

        Does nothing where it has finished already.
        """
        if seq.state is SeqState.FINISHED:
            return
        if seq.state is SeqState.RUNNING:
            self._stop_running(seq)
        else:
            self._waiting.remove(seq)
        seq.become(SeqState.FINISHED)
        seq.finish_reason, seq.stop_reason = reason, stop_reason

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages; those that are held stay with their holders."""
        self.cache.reset()

    def schedule(self) -> StepPlan:
        """Choose the next step's work: who computes how many tokens.

        The plan is empty where nothing can be done before a step in flight is committed.
        """
        cap = plain_cap = self.limits.max_num_batched_tokens
        if self._scored_was_left_out:
            plain_cap = max(1, min(cap, self.limits.max_num_scored_tokens) // 2)
        most = self.limits.max_num_scored_tokens, self.limits.long_prefill_token_threshold
        draft = PlanDraft(cap, plain_cap, *most)
        self._speculator.begin_step(draft, self._running.values(), bool(self._waiting))
        self._plan_running(draft)
        if self._waiting and not draft.has_preempted:
            self._plan_waiting(draft)
        self._scored_was_left_out = draft.left_out_scored
        if self._waiting:
            self.wait_cause = wait_cause(draft, has_slots=bool(self._free_slots))
        if self.traces:
            note_plan(self.traces, draft, self.wait_cause, self.pool.page_size, self.limits)
        self._waiting.served(draft.rows)
        return StepPlan(draft.rows, tuple(draft.slot_resets), draft.drafts)

    def commit(self, plan: StepPlan, sampled: Seq[Sampled]) -> list[Sequence]:
        """Take in what a step sampled, one entry a row; what a row samples too early is None.

        Returns the sequences that got a token or finished. Rows of sequences that finished
        meanwhile are ignored.
        """
        if plan.drafts:
            return [self._settle(*done) for done in take_verified(plan, sampled)]
        page_size, finished, rows = self.pool.page_size, SeqState.FINISHED, plan.columns
        changed: list[Sequence] = []
        for i, (seq, samples, token) in enumerate(
            zip(rows.seqs, rows.samples, sampled, strict=True)
        ):
            if seq.state is finished:
                continue
            if samples:
                if not isinstance(token, int):
                    raise InvariantError(f"sequence {seq.seq_id}: its step sampled no token")
                seq.token_ids.append(token)
                seq.num_in_flight -= 1
                changed.append(seq)
            num_done = rows.starts[i] + rows.q_lens[i]
            if num_done // page_size > seq.num_registered_pages:
                self._register(seq, rows.num_preemptions[i], num_done)
            if samples:
                ends = token in seq.stop_ids or len(seq.token_ids) > seq.num_needed_tokens
                if ends and (cause := stop_cause(seq)):
                    self.finish(seq, *cause)
            elif not seq.request.max_tokens and num_done == seq.num_prompt_tokens:
                self.finish(seq, "length", None)
                changed.append(seq)
        return changed

    def check(self) -> None:
        """Compare pages, reference counts, slots and states; costs a walk over all pages.

        Raises:
            InvariantError: something does not add up.
        """
        self.pool.check()
        self.pool.check_holders(seq.page_ids for seq in self._running.values())
        self.cache.check()
        check_states(self.running, list(self._waiting), self._free_slots, self.limits.max_num_seqs)

    def _settle(self, row: PlannedRow, num_done: int, cause: StopCause | None) -> Sequence:
        """What follows from tokens that a step with drafts gave."""
        if num_done // self.pool.page_size > row.seq.num_registered_pages:
            self._register(row.seq, row.num_preemptions, num_done)
        if cause:
            self.finish(row.seq, *cause)
        return row.seq

    def _plan_running(self, draft: PlanDraft) -> None:
        """Rows of the sequences that hold pages, the last to give way first."""
        page_size, running, rows = self.pool.page_size, SeqState.RUNNING, draft.rows
        draft.order = self._waiting.in_order(self._running.values())
        for seq in draft.order:
            if seq.state is not running:
                continue  # preempted a moment ago, to make room for one before it
            start, num_in_flight, slot = seq.num_computed_tokens, seq.num_in_flight, seq.slot
            if (
                len(seq.token_ids) + num_in_flight - start != 1
                or start < seq.num_prompt_tokens
                or start >= len(seq.page_ids) * page_size
                or seq.needs_read_tokens
                or slot is None
                or draft.speculates
            ):
                self._plan_running_one(seq, start, draft)
            elif start < seq.num_needed_tokens and draft.num_tokens < draft.plain_cap:
                # a decode within its last page: most rows of most steps, so kept short
                rows.seqs.append(seq)
                rows.slots.append(slot)
                rows.starts.append(start)
                rows.q_lens.append(1)
                rows.samples.append(True)
                rows.num_preemptions.append(seq.num_preemptions)
                draft.num_tokens += 1
                seq.num_computed_tokens, seq.num_in_flight = start + 1, num_in_flight + 1

    def _plan_running_one(self, seq: Sequence, start: int, draft: PlanDraft) -> None:
        """A row for a sequence that holds pages, and more pages if it needs them."""
        guessed = self._speculator.draft(seq, draft, self.pool) if draft.speculates else ()
        q_len = draft.choose_q_len(seq, start)
        if q_len <= 0:
            return
        missing = self.pool.pages_for(start + q_len + len(guessed)) - len(seq.page_ids)
        if missing > 0:
            if not self._make_room(seq, missing, draft):
                return
            seq.page_ids += self.pool.take(missing)
        if guessed:
            draft.drafts[len(draft.rows)] = guessed
        self._add_row(seq, q_len, draft, len(guessed))

    def _plan_waiting(self, draft: PlanDraft) -> None:
        """Admit waiting sequences while there are tokens, slots and pages; none is passed over."""
        claimed = -1  # pages that running prompts will still need
        while self._waiting and self._free_slots and draft.num_tokens < draft.cap:
            seq = draft.next = self._waiting.first()
            if seq.num_in_flight or not self.pool.num_free:
                break
            if claimed < 0:
                claimed = self._claimed_pages()
            found = self._find_cached(seq)
            start = len(found) * self.pool.page_size
            q_len = draft.choose_q_len(seq, start)
            if q_len <= 0 or not self._fits(seq, found, start + q_len, claimed):
                break
            self._admit(seq, found, start + q_len, draft)
            self._add_row(seq, q_len, draft)
            if self.limits.reserves:
                claimed += self._pages_to_come(seq)

    def _add_row(self, seq: Sequence, q_len: int, draft: PlanDraft, num_guessed: int = 0) -> None:
        start, slot = seq.num_computed_tokens, seq.slot
        assert slot is not None
        is_last = start + q_len == len(seq.token_ids) + seq.num_in_flight
        samples = is_last and seq.request.max_tokens > 0
        q_len += num_guessed
        draft.rows.add(PlannedRow(seq, slot, start, q_len, samples, seq.num_preemptions))
        draft.num_tokens += q_len
        seq.num_computed_tokens = start + q_len
        seq.num_in_flight += samples

    def _find_cached(self, seq: Sequence) -> list[int]:
        params = seq.request.params
        skips = params.skip_reading_prefix_cache or params.prompt_logprobs is not None
        return [] if skips or not self.limits.enable_prefix_caching else self.cache.find(seq)

    def _fits(self, seq: Sequence, found: list[int], num_tokens: int, claimed: int) -> bool:
        """Whether the first `num_tokens` tokens find pages, or all that limits reserve for."""
        if self.limits.reserves:
            num_tokens = self._num_reserved_tokens(seq)
        needed = self.pool.pages_for(num_tokens) - len(found) + claimed
        return needed + self.pool.num_free_among(found) <= self.pool.num_free

    def _claimed_pages(self) -> int:
        running = self._running.values() if self.limits.reserves else ()
        return sum([self._pages_to_come(seq) for seq in running])

    def _pages_to_come(self, seq: Sequence) -> int:
        return max(self.pool.pages_for(self._num_reserved_tokens(seq)) - len(seq.page_ids), 0)

    def _num_reserved_tokens(self, seq: Sequence) -> int:
        if self.limits.reserve_whole_answer:
            return seq.num_needed_tokens
        return min(seq.num_known_tokens, seq.num_needed_tokens)

    def _num_uncached(self, seq: Sequence) -> int:
        return seq.num_known_tokens - len(self._find_cached(seq)) * self.pool.page_size

    def _admit(self, seq: Sequence, found: list[int], num_tokens: int, draft: PlanDraft) -> None:
        """Give a waiting sequence its slot, and pages for its first `num_tokens` tokens."""
        self._waiting.remove(seq)
        self._running[seq.seq_id] = seq
        seq.become(SeqState.RUNNING)
        seq.slot = self._free_slots.pop()
        self.cache.share(seq, found)
        seq.page_ids += self.pool.take(self.pool.pages_for(num_tokens) - len(found))
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.monotonic()
        if seq.request.params.has_penalties:
            draft.slot_resets.append((seq.slot, tuple(seq.token_ids), seq.num_prompt_tokens))

    def _make_room(self, seq: Sequence, num_pages: int, draft: PlanDraft) -> bool:
        """Preempt from the order's end on until pages are free; False if that reached `seq`."""
        while self.pool.num_free < num_pages:
            while draft.order[-1].state is not SeqState.RUNNING:
                draft.order.pop()
            victim = draft.order.pop()
            self._preempt(victim)
            draft.has_preempted = True
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """By recompute: the pages go, the tokens stay; it waits to be admitted again."""
        self._stop_running(seq)
        seq.become(SeqState.WAITING)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put_back(seq)

    def _stop_running(self, seq: Sequence) -> None:
        del self._running[seq.seq_id]
        self.pool.give_back(seq.page_ids)
        assert seq.slot is not None
        self._free_slots.append(seq.slot)
        seq.page_ids, seq.slot = [], None

    def _register(self, seq: Sequence, num_preemptions: int, num_done: int) -> None:
        if self.limits.enable_prefix_caching and num_preemptions == seq.num_preemptions:
            self.cache.register(seq, num_done)
