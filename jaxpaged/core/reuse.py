"""What a sequence need not compute, because another one did or will."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpaged.core.cached_page import Begun, CachedPage
from jaxpaged.core.foresight import Foresight
from jaxpaged.core.forks import Forks
from jaxpaged.core.host_prefixes import HostPrefixes
from jaxpaged.core.host_tier import HostTier
from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.pinned import PinnedPrefixes
from jaxpaged.core.plan import PlanDraft
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.errors import RequestError


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages to share, all full, and a page to copy into the next one, if there is one."""

    page_ids: list[int]
    begun: Begun | None
    num_tokens: int  # that are in all of these, or come back from host memory
    off_device: Seq[CachedPage] = ()  # full pages that follow and come back from there


_MISS = Hit([], None, 0)

type Claimed = tuple[int, int]
"""Pages and local pages."""


class PageReuse:
    """Shares pages between sequences when they begin and while they compute prompts.

    Owned by the scheduler, like the cache and the pool.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        cache: PrefixCache,
        local: LocalPages | None,
    ):
        self._limits, self._pool, self._cache, self._local = limits, pool, cache, local
        self.forks, self.tier = Forks(), HostTier(limits, pool, local)
        self.host: HostPrefixes | None = None
        if limits.num_host_pages and limits.enable_prefix_caching and local is None:
            self.host = HostPrefixes(self.tier, pool, cache)
        self._foresight: Foresight | None = None
        if limits.admission == "foresee":
            self._foresight = Foresight(pool, by_priority=limits.scheduling_policy == "priority")
        most_pinned = pool.num_usable - pool.pages_for(limits.max_model_len)
        self.pinned = PinnedPrefixes(pool, cache, most_pinned, local)
        # chunks of whole pages: where they end, another with the same prompt can take over
        threshold, page_size = limits.long_prefill_token_threshold, pool.page_size
        if local is not None:
            threshold = min(threshold or local.most_of_one_prompt, local.most_of_one_prompt)
        self.most_of_one_prompt = threshold // page_size * page_size or threshold

    def check(self, seq: Sequence) -> None:
        """Refuse a sequence that could never get its pages, or whose pages could not be pinned.

        Raises:
            RequestError: the pool has not so many, or too many are pinned.
        """
        request, pool = seq.request, self._pool
        needed = pool.pages_for(seq.num_needed_tokens)
        kind, num_usable = "pages", pool.num_usable
        if self._local is not None and needed <= num_usable:
            kind, num_usable = "local pages", self._local.pool.num_usable
            needed = self._local.most_held(seq.num_needed_tokens)
        if needed > num_usable:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens, max_tokens {request.max_tokens}: need "
                f"{needed} {kind} of {pool.page_size} tokens, the pool has {num_usable}: "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if request.pin:
            if not self._limits.enable_prefix_caching:
                raise RequestError("no prefix can be warmed: the prefix cache is switched off")
            self.pinned.check_room(request, request.pin)

    def find(self, seq: Sequence) -> Hit:
        """What there is of a sequence that holds no pages."""
        may_read = self._may_read(seq)
        page_ids = self._cache.find(seq) if may_read else []
        if self._local is not None:
            is_swapped = seq.state is SeqState.SWAPPED
            page_ids = (
                self._local.usable_by_swapped(seq, page_ids)
                if is_swapped
                else self._local.usable(page_ids)
            )
        num_tokens = len(page_ids) * self._pool.page_size
        if seq.state is SeqState.SWAPPED:
            return Hit(page_ids, None, max(num_tokens, seq.num_computed_tokens))
        if not may_read:
            return _MISS
        pages = self.host.find(seq, page_ids) if self.host else ()
        if pages:
            num_tokens += len(pages) * self._pool.page_size
            return Hit(page_ids, None, num_tokens, pages)
        begun = self._cache.find_begun(seq, page_ids) if seq.request.copies_begun_page else None
        if begun and self._local is not None and not self._local.has(begun.page_id):
            begun = None
        return Hit(page_ids, begun, num_tokens + (begun.num_tokens if begun else 0))

    def find_fitting(self, seq: Sequence, draft: PlanDraft, claimed: Claimed) -> tuple[Hit, int]:
        """What there is of a sequence to admit, and how many tokens it computes then; 0: it waits.

        A copy needs its source beside the new page: who fills the pool by itself does without.
        """
        hit = self.find(seq)
        q_len = self._num_fitting(seq, hit, draft, claimed)
        if not q_len and hit.begun:
            hit = Hit(hit.page_ids, None, len(hit.page_ids) * self._pool.page_size)
            q_len = self._num_fitting(seq, hit, draft, claimed)
        return hit, q_len

    def fits_unshared(self, seq: Sequence, claimed: Claimed) -> bool:
        """Whether a waiting sequence certainly finds pages; no prefix is looked up."""
        pages = self._pool.pages_for(self._limits.num_reserved_tokens(seq))
        fits = self._local is None and pages + claimed[0] <= self._pool.num_free
        return fits and (self._foresight is None or self._foresight.fits(seq, []))

    def _num_fitting(self, seq: Sequence, hit: Hit, draft: PlanDraft, claimed: Claimed) -> int:
        q_len = draft.choose_q_len(seq, hit.num_tokens)
        fits = q_len > 0 and self._fits(seq, hit, hit.num_tokens + q_len, claimed)
        fits = fits and (self._foresight is None or self._foresight.fits(seq, hit.page_ids))
        return q_len if fits else 0

    def num_uncached(self, seq: Sequence) -> int:
        """Known tokens of a sequence without pages that it would have to compute."""
        return seq.num_known_tokens - self.find(seq).num_tokens

    def claimed(self, running: Iterable[Sequence], so_far: Claimed = (0, 0)) -> Claimed:
        """Pages that running sequences will still need, where limits reserve for them."""
        for seq in running if self._limits.reserves else ():
            pages, local_pages = self._to_come(seq)
            so_far = so_far[0] + pages, so_far[1] + local_pages
        return so_far

    def _to_come(self, seq: Sequence) -> Claimed:
        """Pages and local pages that a sequence with pages will still need."""
        num_tokens, num_held = self._limits.num_reserved_tokens(seq), len(seq.page_ids)
        pages = max(self._pool.pages_for(num_tokens) - num_held, 0)
        if self._local is None:
            return pages, 0
        num_held -= seq.first_local_page
        return pages, max(self._local.most_held(num_tokens) - num_held, 0)

    def _fits(self, seq: Sequence, hit: Hit, num_tokens: int, claimed: Claimed) -> bool:
        """Whether the first `num_tokens` tokens find pages, or all that limits reserve for."""
        begun = [hit.begun.page_id] if hit.begun else []
        end = self._limits.num_reserved_tokens(seq) if self._limits.reserves else num_tokens
        missing = self._pool.pages_for(end) - len(hit.page_ids)
        touched = [*hit.page_ids, *begun] if begun else hit.page_ids
        if missing + self._pool.num_free_among(touched) + claimed[0] > self._pool.num_free:
            return False
        if self._local is None:
            return True
        needed = self._local.num_to_take(hit.page_ids, begun, hit.num_tokens, num_tokens)
        if self._limits.reserves:
            needed = max(needed, self._local.most_held(end))
        return needed + claimed[1] <= self._local.pool.num_free

    def give_pages(self, seq: Sequence, hit: Hit, num_tokens: int, draft: PlanDraft) -> None:
        """Pages for the first `num_tokens` tokens, and the copies that the step begins with.

        Their sources are held until `end_plan`, so that this step writes to none of them.
        """
        was_swapped = seq.state is SeqState.SWAPPED
        num_off_device = len(hit.off_device) * self._pool.page_size
        self._cache.share(seq, hit.page_ids, hit.num_tokens, num_off_device)
        if self.host:
            self.host.claim(hit.off_device)
        begun, num_shared, num_bare = hit.begun, len(hit.page_ids), 0
        if begun:
            self._pool.share([begun.page_id])
        if self._local is not None:
            num_bare = self._local.enter(seq, hit.num_tokens)
            self._local.hold([begun.page_id] if begun else [])
        seq.page_ids += self._pool.take(self._pool.pages_for(num_tokens) - num_shared, num_bare)
        if self.host and hit.off_device:
            page_ids = seq.page_ids[num_shared : num_shared + len(hit.off_device)]
            self.host.bring_back(seq, hit.off_device, page_ids)
        if was_swapped:
            self.tier.brings_back(seq, num_shared, hit.num_tokens)
        if begun:
            draft.page_copies.append((begun.page_id, seq.page_ids[num_shared]))
        if self._foresight is not None:
            self._foresight.enter(seq)

    def joins(self, seq: Sequence) -> bool:
        """Share pages after the sequence's own that another computed, or will in this step."""
        num_pages = seq.num_registered_pages
        at_border = num_pages * self._pool.page_size == seq.num_computed_tokens
        if not at_border or num_pages != len(seq.page_ids) or not self._may_read(seq):
            return False
        page_ids = self._cache.find(seq, num_pages)
        if self._local is not None:
            both = self._local.usable([*seq.page_ids, *page_ids], seq.first_local_page)
            page_ids = both[num_pages:]
        self._cache.extend(seq, page_ids)
        if self._local is not None:
            self._local.extended(seq, num_pages)
        return bool(page_ids)

    def planned(self, seq: Sequence, start: int) -> None:
        """A row from `start` on is planned: others may find the pages that it fills."""
        num_done = min(seq.num_computed_tokens, len(seq.token_ids))
        if self._registers(seq) and num_done // self._pool.page_size > seq.num_registered_pages:
            self._cache.register(seq, num_done)
        if start < seq.num_prompt_tokens <= num_done:
            if seq.request.copies_begun_page:
                self._cache.register_begun(seq, num_done)
            self.forks.release(seq)

    def committed(self, seq: Sequence, num_preemptions: int, num_done: int) -> None:
        """The first `num_done` tokens are computed, and read by the host.

        A row planned before the sequence's last preemption filled pages that it no longer has.
        """
        if num_preemptions == seq.num_preemptions and self._registers(seq):
            self._cache.register(seq, num_done)

    def finishing(self, seq: Sequence, reason: str) -> None:
        """A sequence that ran is about to give its pages back."""
        if self._foresight is not None:
            self._foresight.finishing(seq, reason)
        if reason == "error":  # what is in the pages that it computed must not be used
            self._cache.forget_pages(seq.page_ids[seq.num_shared_pages :])
        elif seq.request.pin and reason == "length":
            self.pinned.pin(seq)

    def leave(self, seq: Sequence) -> None:
        """Give all pages of a sequence back."""
        if self._foresight is not None:
            self._foresight.leave(seq)
        if self._local is not None:
            self._local.leave(seq)
        self._pool.give_back(seq.page_ids)

    def end_plan(self, draft: PlanDraft) -> None:
        """No more pages are taken for this step."""
        if self._foresight is not None:
            self._foresight.end_plan()
        if not draft.page_copies:
            return
        sources, targets = zip(*draft.page_copies, strict=True)
        if self._local is not None:
            pairs = zip(self._local.ids(sources), self._local.ids(targets), strict=True)
            draft.local_copies += pairs
            self._local.release(sources)
        self._pool.give_back(sources)

    def check_cache(self) -> None:
        """Compare what can be found with where it is. Raises InvariantError."""
        self._cache.check()
        if self.host is not None:
            self.host.check()

    def _may_read(self, seq: Sequence) -> bool:
        params = seq.request.params
        if seq.choice or params.copies_begun_page:
            return True  # what its like computed, at least
        skips = params.skip_reading_prefix_cache or params.prompt_logprobs is not None
        return self._limits.enable_prefix_caching and not skips

    def _registers(self, seq: Sequence) -> bool:
        return self._limits.enable_prefix_caching or seq.request.copies_begun_page
