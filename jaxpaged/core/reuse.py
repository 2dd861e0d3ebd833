"""What a sequence need not compute, because another one did or will."""

from dataclasses import dataclass

from jaxpaged.core.forks import Forks
from jaxpaged.core.host_tier import HostTier
from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.pinned import PinnedPrefixes
from jaxpaged.core.prefix_cache import Begun, PrefixCache
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.errors import RequestError


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages to share, all full, and a page to copy into the next one, if there is one."""

    page_ids: list[int]
    begun: Begun | None
    num_tokens: int  # that are in all of these, or come back from host memory


_MISS = Hit([], None, 0)


class PageReuse:
    """Shares pages between sequences when they begin and while they compute prompts.

    Owned by the scheduler, like the cache and the pool.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool, cache: PrefixCache):
        self._limits, self._pool, self._cache = limits, pool, cache
        self.forks, self.tier = Forks(), HostTier(limits, pool)
        most_pinned = pool.num_usable - pool.pages_for(limits.max_model_len)
        self.pinned = PinnedPrefixes(pool, cache, most_pinned)
        # chunks of whole pages: where they end, another with the same prompt can take over
        threshold, page_size = limits.long_prefill_token_threshold, pool.page_size
        self.most_of_one_prompt = threshold // page_size * page_size or threshold

    def check(self, seq: Sequence) -> None:
        """Refuse a sequence that could never get its pages, or whose pages could not be pinned.

        Raises:
            RequestError: the pool has not so many, or too many are pinned.
        """
        request, pool = seq.request, self._pool
        needed = pool.pages_for(seq.num_needed_tokens)
        if needed > pool.num_usable:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens, max_tokens {request.max_tokens}: need "
                f"{needed} pages of {pool.page_size} tokens, the pool has {pool.num_usable}: "
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
        num_tokens = len(page_ids) * self._pool.page_size
        if seq.state is SeqState.SWAPPED:
            return Hit(page_ids, None, max(num_tokens, seq.num_computed_tokens))
        if not may_read:
            return _MISS
        begun = self._cache.find_begun(seq, page_ids) if seq.request.copies_begun_page else None
        return Hit(page_ids, begun, num_tokens + (begun.num_tokens if begun else 0))

    def num_uncached(self, seq: Sequence) -> int:
        """Known tokens of a sequence without pages that it would have to compute."""
        return seq.num_known_tokens - self.find(seq).num_tokens

    def num_pages_to_take(self, hit: Hit, num_tokens: int) -> int:
        """How many free pages go when a sequence gets this hit and pages for `num_tokens`."""
        touched = [*hit.page_ids, hit.begun.page_id] if hit.begun else hit.page_ids
        missing = self._pool.pages_for(num_tokens) - len(hit.page_ids)
        return missing + self._pool.num_free_among(touched)

    def give_pages(self, seq: Sequence, hit: Hit, num_tokens: int) -> list[tuple[int, int]]:
        """Pages for the first `num_tokens` tokens; returns the copies that the step begins with.

        Their sources are held until `end_plan`, so that this step writes to none of them.
        """
        was_swapped = seq.state is SeqState.SWAPPED
        self._cache.share(seq, hit.page_ids, hit.num_tokens)
        if hit.begun:
            self._pool.share([hit.begun.page_id])
        num_shared = len(hit.page_ids)
        seq.page_ids += self._pool.take(self._pool.pages_for(num_tokens) - num_shared)
        if was_swapped:
            self.tier.brings_back(seq, num_shared, hit.num_tokens)
        return [(hit.begun.page_id, seq.page_ids[num_shared])] if hit.begun else []

    def joins(self, seq: Sequence) -> bool:
        """Share pages after the sequence's own that another computed, or will in this step."""
        num_pages = seq.num_registered_pages
        at_border = num_pages * self._pool.page_size == seq.num_computed_tokens
        if not at_border or num_pages != len(seq.page_ids) or not self._may_read(seq):
            return False
        page_ids = self._cache.find(seq, num_pages)
        self._cache.extend(seq, page_ids)
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
        if reason == "error":  # what is in the pages that it computed must not be used
            self._cache.forget_pages(seq.page_ids[seq.num_shared_pages :])
        elif seq.request.pin and reason == "length":
            self.pinned.pin(seq)

    def end_plan(self, page_copies: list[tuple[int, int]]) -> None:
        """No more pages are taken for this step."""
        if page_copies:
            self._pool.give_back([source for source, _ in page_copies])

    def _may_read(self, seq: Sequence) -> bool:
        params = seq.request.params
        if seq.choice or params.copies_begun_page:
            return True  # what its like computed, at least
        skips = params.skip_reading_prefix_cache or params.prompt_logprobs is not None
        return self._limits.enable_prefix_caching and not skips

    def _registers(self, seq: Sequence) -> bool:
        return self._limits.enable_prefix_caching or seq.request.copies_begun_page
