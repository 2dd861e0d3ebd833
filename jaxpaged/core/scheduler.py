"""Who computes how much in the next step, who waits, who must give way."""

import time
from collections.abc import Sequence as Seq

from jaxpaged.core.background import make_layers
from jaxpaged.core.filling import StepFilling
from jaxpaged.core.limits import SchedulerLimits, StopCause, check_states, stop_cause
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.logit_edits import check_edits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import PlanDraft, PlannedRow, Sampled, StepPlan
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.reuse import Hit, PageReuse
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.core.speculator import Speculator
from jaxpaged.core.steady import SteadyRows
from jaxpaged.core.trace import Trace, WaitCause, note_plan, wait_cause
from jaxpaged.core.turns import Turns
from jaxpaged.errors import InvariantError, PromptTooLong


class Scheduler:
    """One loop in which prefill and decode are the same; a policy says who is next.

    The engine plans a step before it commits the one before: `schedule` counts a step's tokens as
    computed at once, `commit` appends what was sampled. Not safe for use by several threads.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        cache: PrefixCache,
        local: LocalPages | None = None,
    ):
        self.limits, self.pool, self.cache, self.local = limits, pool, cache, local
        self.num_preemptions = 0
        self._running: dict[int, Sequence] = {}  # by seq_id, oldest first
        self._reuse = PageReuse(limits, pool, cache, local)
        self._forks, self.pinned = self._reuse.forks, self._reuse.pinned
        self.tier, self.host_prefixes = self._reuse.tier, self._reuse.host
        self._waiting = make_layers(limits.scheduling_policy, self._reuse.num_uncached)
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._scored_was_left_out = False
        self.wait_cause: WaitCause = "line"  # why the last plan admitted nobody further
        self.traces: dict[int, Trace] = {}  # by seq_id, of those that are to be explained
        self._speculator, self._turns = Speculator(limits), Turns(limits.num_stages)
        self._steady = SteadyRows(pool, local)
        self._filling = StepFilling(limits, pool, self._reuse, self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold pages, oldest first."""
        return list(self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._forks)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of all waiting sequences; costs a walk over them."""
        return sum([len(seq.token_ids) for seq in (*self._waiting, *self._forks)])

    @property
    def is_drafting(self) -> bool:
        """Whether rows wait for their tokens, to be given guesses at the next ones."""
        return self._speculator.is_drafting

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._forks.ready)

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
        self._reuse.check(seq)
        if not self._forks.takes(seq):
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
            self._reuse.finishing(seq, reason)
            self._stop_running(seq)
        elif not self._forks.drop(seq):
            self._waiting.remove(seq)
            self.tier.forget(seq)
        if self._forks:
            self._forks.release(seq)
        seq.become(SeqState.FINISHED)
        seq.finish_reason, seq.stop_reason = reason, stop_reason

    def drop_prefix(self, prefix_id: str) -> bool:
        """Let a warm prefix be evicted like any other; False if there is none of this id."""
        return self.pinned.drop(prefix_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages, the pinned ones too; those of sequences stay with these."""
        self.pinned.drop_all()
        self.cache.reset()

    def schedule(self) -> StepPlan:
        """Choose the next step's work: who computes how many tokens.

        The plan is empty where nothing can be done before a step in flight is committed.
        """
        self.cache.step += 1
        self._forks.queue_ready(self._waiting)
        cap = plain_cap = self.limits.max_num_batched_tokens
        if self._scored_was_left_out:
            plain_cap = max(1, min(cap, self.limits.max_num_scored_tokens) // 2)
        most = self.limits.max_num_scored_tokens, self._reuse.most_of_one_prompt
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
        self._reuse.end_plan(draft)
        resets = tuple(draft.slot_resets)
        copies, local_copies = tuple(draft.page_copies), tuple(draft.local_copies)
        # without rows nobody writes to a page that is to be moved, and it may be moved later
        moves = self.tier.take_moves() if draft.rows and self.tier.has_moves else ()
        return StepPlan(draft.rows, resets, draft.drafts, copies, moves, local_copies)

    def commit(self, plan: StepPlan, sampled: Seq[Sampled], seconds: float = 0.0) -> list[int]:
        """Take in what a step sampled, one entry a row; what a row samples too early is None.

        Returns the rows whose sequences got a token or finished. Rows of sequences that finished
        meanwhile are ignored. `seconds` are those since the step before was read, 0 if not known.
        """
        self._speculator.committed(plan, seconds)
        if plan.drafts:
            return [self._settle(*done) for done in self._speculator.take_verified(plan, sampled)]
        page_size, finished, rows = self.pool.page_size, SeqState.FINISHED, plan.columns
        changed: list[int] = []
        for i, (seq, start, q_len, token) in enumerate(
            zip(rows.seqs, rows.starts, rows.q_lens, sampled, strict=True)
        ):
            if seq.state is finished:
                continue
            num_done = start + q_len
            if isinstance(token, int):
                seq.token_ids.append(token)
                seq.num_in_flight -= 1
                changed.append(i)
            elif rows.samples[i]:
                raise InvariantError(f"sequence {seq.seq_id}: its step sampled no token")
            if num_done // page_size > seq.num_registered_pages:
                self._reuse.committed(seq, rows.num_preemptions[i], num_done)
            if token is None:
                if num_done == seq.num_needed_tokens and not seq.request.max_tokens:
                    self.finish(seq, "length", None)  # its prompt was all that was wanted
                    changed.append(i)
            elif (token in seq.stop_ids or num_done >= seq.num_needed_tokens) and (
                cause := stop_cause(seq)
            ):
                self.finish(seq, *cause)
        return changed

    def check(self) -> None:
        """Compare pages, reference counts, slots and states; costs a walk over all pages.

        Raises:
            InvariantError: something does not add up.
        """
        self.pool.check()
        holders = [*self.running, *self.pinned]
        self.pool.check_holders([holder.page_ids for holder in holders])
        if self.local is not None:
            self.local.check(self.pool, holders)
        self._reuse.check_cache()
        check_states(self.running, list(self._waiting), self._free_slots, self.limits.max_num_seqs)

    def _settle(self, i: int, row: PlannedRow, num_done: int, cause: StopCause | None) -> int:
        """What follows from tokens that row `i` of a step with drafts gave."""
        if num_done // self.pool.page_size > row.seq.num_registered_pages:
            self._reuse.committed(row.seq, row.num_preemptions, num_done)
        if cause:
            self.finish(row.seq, *cause)
        return i

    def _plan_running(self, draft: PlanDraft) -> None:
        """Rows of the sequences that hold pages, the last to give way first."""
        draft.order = self._waiting.in_order(self._running.values())
        chosen = self._turns.choose(draft)
        num_done = self._steady.plan(draft, chosen)
        num_rows, others = len(draft.rows), chosen[num_done:]
        is_plain, running = not draft.speculates, SeqState.RUNNING
        for seq in others:
            if seq.state is not running:
                continue  # preempted a moment ago, to make room for one before it
            if not (is_plain and self._steady.add_row(draft, seq)):
                self._plan_running_one(seq, seq.num_computed_tokens, draft)
        if is_plain and chosen is draft.order:  # where stages take turns, none comes again next
            self._steady.learn(draft.rows, num_rows, others)

    def _plan_running_one(self, seq: Sequence, start: int, draft: PlanDraft) -> None:
        """A row for a sequence that holds pages, and more pages if it needs them."""
        guessed = self._speculator.draft(seq, draft, self.pool) if draft.speculates else ()
        q_len = draft.choose_q_len(seq, start)
        if q_len > 1 and self._reuse.joins(seq):
            start = seq.num_computed_tokens
            q_len = draft.choose_q_len(seq, start)
        if q_len <= 0:
            return
        if self.local is not None:
            self.local.move_on(seq, start)
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
        claimed: tuple[int, int] | None = None  # pages that running prompts will still need
        while self._waiting and self._free_slots and draft.num_tokens < draft.cap:
            seq = draft.next = self._waiting.first()
            if seq.num_in_flight or not self.pool.room:
                break
            if claimed is None:
                claimed = self._reuse.claimed(self._running.values())
            hit, q_len = self._reuse.find_fitting(seq, draft, claimed)
            if q_len <= 0:
                break
            self._admit(seq, hit, hit.num_tokens + q_len, draft)
            has_slots = bool(self._free_slots)
            q_len = self._filling.cut(seq, q_len, draft, claimed, has_slots=has_slots)
            self._add_row(seq, q_len, draft)
            claimed = self._reuse.claimed([seq], claimed)

    def _add_row(self, seq: Sequence, q_len: int, draft: PlanDraft, num_guessed: int = 0) -> None:
        start, slot = seq.num_computed_tokens, seq.slot
        assert slot is not None
        is_last = start + q_len == seq.num_known_tokens
        samples = is_last and seq.request.max_tokens > 0
        q_len += num_guessed
        draft.rows.add(PlannedRow(seq, slot, start, q_len, samples, seq.num_preemptions))
        draft.num_tokens += q_len
        seq.num_computed_tokens = start + q_len
        seq.num_in_flight += samples
        if start < seq.num_prompt_tokens or q_len > 1:
            self._reuse.planned(seq, start)

    def _admit(self, seq: Sequence, hit: Hit, num_tokens: int, draft: PlanDraft) -> None:
        """Give a waiting sequence its slot, and pages for its first `num_tokens` tokens."""
        self._waiting.remove(seq)
        self._running[seq.seq_id] = seq
        self._reuse.give_pages(seq, hit, num_tokens, draft)
        seq.become(SeqState.RUNNING)
        seq.slot = self._free_slots.pop()
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.monotonic()
        if seq.request.params.has_penalties:
            draft.slot_resets.append((seq.slot, tuple(seq.token_ids), seq.num_prompt_tokens))

    def _make_room(self, seq: Sequence, num_pages: int, draft: PlanDraft) -> bool:
        """Preempt from the order's end on until pages are free; False if that reached `seq`."""
        while self.pool.room < num_pages:
            while draft.order[-1].state is not SeqState.RUNNING:
                draft.order.pop()
            victim = draft.order.pop()
            self._preempt(victim)
            draft.has_preempted = True
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """The pages go, the tokens stay; it waits to be admitted again."""
        is_swapped = self.tier.takes(seq)
        self._stop_running(seq)
        seq.become(SeqState.SWAPPED if is_swapped else SeqState.WAITING)
        if not is_swapped:
            seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put_back(seq)

    def _stop_running(self, seq: Sequence) -> None:
        del self._running[seq.seq_id]
        self._steady.leave()
        self._reuse.leave(seq)
        assert seq.slot is not None
        self._free_slots.append(seq.slot)
        seq.page_ids, seq.slot = [], None
