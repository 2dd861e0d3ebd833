"""Evicted prefix pages in host memory, and back."""

from collections import OrderedDict
from collections.abc import Sequence as Seq

from jaxpaged.core.cached_page import CachedPage
from jaxpaged.core.host_tier import MOVE_WIDTHS, HostTier
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import PageMove
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.sequence import Sequence
from jaxpaged.errors import InvariantError


class _Chunk:
    """Pages that went to host memory together: `pages` by row, None for what is gone or padding."""

    __slots__ = ("chunk_id", "is_claimed", "num_live", "pages", "width")

    def __init__(self, chunk_id: int, width: int, pages: Seq[CachedPage]):
        self.chunk_id, self.width = chunk_id, width
        self.pages: list[CachedPage | None] = list(pages)
        self.num_live = len(self.pages)
        self.is_claimed = True  # some of it is on its way here or back


class HostPrefixes:
    """Keeps pages that the pool evicts, as long as the host tier has room. Owned by the scheduler.

    What was evicted first goes first, and all of it before a preempted sequence's pages. The prefix
    cache still finds the pages, each on the device or here; one that comes back is gone here. The
    pool evicts a whole transfer's pages at once.
    """

    def __init__(self, tier: HostTier, pool: PagePool, cache: PrefixCache):
        self._tier, self._pool, self._cache = tier, pool, cache
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()  # oldest first
        self._last_id = 0  # of chunks; they count down, sequences up
        self.num_stored = self.num_loaded = 0  # pages, since start
        pool.evict_group, pool.before_evict = MOVE_WIDTHS[0], self._take_in
        cache.on_lost, tier.make_room = self._release, self._drop_oldest

    @property
    def num_pages(self) -> int:
        """Pages that can be found here."""
        return sum([chunk.num_live for chunk in self._chunks.values()])

    def find(self, seq: Sequence, page_ids: Seq[int]) -> list[CachedPage]:
        """The pages here that follow the sequence's leading ones on the device."""
        return self._cache.find_off_device(seq, page_ids) if self._chunks else []

    def claim(self, pages: Seq[CachedPage]) -> None:
        """These will be brought back: until then nothing takes their place."""
        for page in pages:
            self._chunks[page.chunk_id].is_claimed = True

    def bring_back(self, seq: Sequence, pages: Seq[CachedPage], page_ids: Seq[int]) -> None:
        """Fill the sequence's new pages, which follow its shared ones, from here."""
        targets: dict[int, list[int]] = {}
        for page, page_id in zip(pages, page_ids, strict=True):
            chunk = self._chunks[page.chunk_id]
            row = chunk.pages.index(page)
            targets.setdefault(page.chunk_id, [0] * len(chunk.pages))[row] = page_id
        for chunk_id, ids in targets.items():
            self._tier.add_move(PageMove("fill", chunk_id, 0, tuple(ids)))
            self._chunks[chunk_id].is_claimed = False
        self._cache.put_back(seq, pages, page_ids)
        self.num_loaded += len(pages)
        for page in pages:
            self._release(page)

    def check(self) -> None:
        """Compare with the cache and the tier.

        Raises:
            InvariantError: a page is here twice, or the cache does not know that it is here.
        """
        places = [
            (chunk.chunk_id, page)
            for chunk in self._chunks.values()
            for page in chunk.pages
            if page is not None
        ]
        known = [page for page in self._cache.pages() if not page.page_id]
        if sorted(map(id, known)) != sorted([id(page) for _, page in places]):
            raise InvariantError("host prefixes: the cache finds other pages off the device")
        if any(page.chunk_id != chunk_id for chunk_id, page in places):
            raise InvariantError("host prefixes: a page says that it is elsewhere")
        width = sum([chunk.width for chunk in self._chunks.values()])
        if width != self._tier.num_prefix_pages or any(
            chunk.is_claimed or chunk.num_live != len(chunk.pages) - chunk.pages.count(None)
            for chunk in self._chunks.values()
        ):
            raise InvariantError("host prefixes: pages are counted wrongly")

    def _take_in(self, page_ids: Seq[int]) -> None:
        """The pool is about to evict these pages: keep those that can be found again."""
        pages, new = self._cache.pages_of(page_ids), list[_Chunk]()
        while pages:
            width = MOVE_WIDTHS[-1] if len(pages) >= MOVE_WIDTHS[-1] else MOVE_WIDTHS[0]
            while self._tier.num_free_pages < width and self._drop_oldest():
                pass
            if self._tier.num_free_pages < width:
                break
            new.append(self._store(pages[:width], width))
            pages = pages[width:]
        for chunk in new:
            chunk.is_claimed = False

    def _store(self, pages: Seq[CachedPage], width: int) -> _Chunk:
        """Move pages here; the chunk is claimed until the pool has let go of them."""
        self._last_id -= 1
        chunk = self._chunks[self._last_id] = _Chunk(self._last_id, width, pages)
        self._tier.num_prefix_pages += width
        page_ids = tuple([page.page_id for page in pages])
        self._tier.add_move(PageMove("out", chunk.chunk_id, 0, page_ids))
        self.num_stored += len(pages)
        for page in pages:
            page.chunk_id = chunk.chunk_id
        return chunk

    def _drop_oldest(self) -> bool:
        """Make room; False where there is nothing to drop."""
        oldest = next((chunk for chunk in self._chunks.values() if not chunk.is_claimed), None)
        for page in [] if oldest is None else list(oldest.pages):
            if page is not None:
                self._cache.forget(page)
        return oldest is not None

    def _release(self, page: CachedPage) -> None:
        """A page is here no longer: it is back, or nobody can find it any more."""
        chunk = self._chunks[page.chunk_id]
        chunk.pages[chunk.pages.index(page)] = None
        chunk.num_live -= 1
        page.chunk_id = 0
        if not chunk.num_live:
            del self._chunks[chunk.chunk_id]
            self._tier.num_prefix_pages -= chunk.width
            self._tier.add_move(PageMove("drop", chunk.chunk_id, 0, ()))
