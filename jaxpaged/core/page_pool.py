"""Who holds which page."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from jaxpaged.errors import InvariantError


def _nobody_listens(page_id: object) -> None:
    pass


class Companions(Protocol):
    """Pages of another pool that belong to pages of this one: `LocalPages`."""

    @property
    def pool(self) -> "PagePool": ...

    def begin(self, page_ids: Iterable[int]) -> None: ...

    def keep(self, page_id: int) -> None: ...

    def forget(self, page_id: int) -> None: ...


class PagePool:
    """Bookkeeping of the pages on the device. Owned by the scheduler.

    A page is in one of three states: held (by one or more sequences), cached (nobody holds it, the
    prefix cache still knows what is in it) or blank. Cached and blank pages are free: blank ones go
    first, then the cached ones, oldest first. Page 0, the null page, is never handed out.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] = _nobody_listens  # told of cached pages taken
        self.before_evict: Callable[[Seq[int]], None] = _nobody_listens
        self.evict_group = 1  # cached pages that lose their content together
        self.local: Companions | None = None  # where layers with a window have their own pages
        self._blank = list(range(num_pages - 1, 0, -1))  # taken from the end
        # places of cached pages, oldest first, `_looked_at` before `_line`; who is shared stays in
        # line, and only a page's last place counts: to take thousands out would take long
        self._looked_at: deque[int] = deque()
        self._line: deque[int] = deque()
        self._next_place = 0  # a place's remainder by `num_pages` is its page
        self._last_place = [-1] * num_pages
        self._num_cached = 0
        self._num_holders = [0] * num_pages
        self._is_kept = bytearray(num_pages)  # known to the prefix cache, held or not

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken, the cached ones included."""
        return len(self._blank) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Free pages whose content can still be found."""
        return self._num_cached

    @property
    def room(self) -> int:
        """Pages that can be taken together with their local pages."""
        num_free = len(self._blank) + self._num_cached
        return num_free if self.local is None else min(num_free, self.local.pool.num_free)

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_free

    @property
    def usage(self) -> float:
        """Share of the pages that somebody holds, 0 to 1; of local pages where that is more."""
        usage = self.num_held / self.num_usable if self.num_usable else 0.0
        return usage if self.local is None else max(usage, self.local.pool.usage)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens of one sequence fill or begin."""
        return -(-num_tokens // self.page_size)

    def num_free_among(self, page_ids: Iterable[int]) -> int:
        """How many of these pages nobody holds; sharing them makes `num_free` that much smaller."""
        holders = self._num_holders
        return [holders[page_id] for page_id in page_ids].count(0)

    def num_shared(self, page_ids: Seq[int]) -> int:
        """How many of a sequence's leading pages it does not hold alone."""
        holders = self._num_holders
        if not page_ids or holders[page_ids[0]] < 2:
            return 0  # who shares a page shares those before it
        return bisect_left(page_ids, True, key=lambda page_id: holders[page_id] < 2)

    def take(self, num_pages: int, num_bare: int = 0) -> list[int]:
        """Hand out pages of undefined content, evicting the oldest cached ones if need be.

        The first `num_bare` get no local pages.

        Raises:
            InvariantError: fewer are free; callers look at `room` first.
        """
        if num_pages > self.num_free:
            raise InvariantError(f"page pool: {num_pages} pages wanted, {self.num_free} are free")
        first = max(len(self._blank) - num_pages, 0)
        taken = self._blank[first:]
        del self._blank[first:]
        if len(taken) < num_pages:
            evicted = self._evict(num_pages - len(taken))
            missing = num_pages - len(taken)
            taken += evicted[:missing]
            self._blank += evicted[missing:]
        for page_id in taken:
            self._num_holders[page_id] = 1
        if self.local is not None:
            self.local.begin(taken[num_bare:])
        return taken

    def _evict(self, num_pages: int) -> list[int]:
        """Take the oldest cached pages out, whole groups if there are so many."""
        num_pages = min(-(-num_pages // self.evict_group) * self.evict_group, self._num_cached)
        page_ids = self._leave_line(num_pages)
        self._num_cached -= num_pages
        self.before_evict(page_ids)
        for page_id in page_ids:
            self._is_kept[page_id] = False
            self.on_evict(page_id)
            if self.local is not None:
                self.local.forget(page_id)
        return page_ids

    def _leave_line(self, num_pages: int) -> list[int]:
        """Take the oldest cached pages out of the line."""
        found = list[int]()
        for line in (self._looked_at, self._line):
            while line and len(found) < num_pages:
                place = line.popleft()
                if self._counts(place):
                    found.append(place % self.num_pages)
        return found

    def _counts(self, place: int) -> bool:
        """Whether a place in line stands for a cached page."""
        page_id = place % self.num_pages
        is_last = self._last_place[page_id] == place
        return is_last and not self._num_holders[page_id] and bool(self._is_kept[page_id])

    def share(self, page_ids: Iterable[int]) -> None:
        """Add a holder to pages that are held or cached."""
        holders, is_kept, num_cached = self._num_holders, self._is_kept, 0
        for page_id in page_ids:
            num_holders = holders[page_id]
            if not num_holders:
                if not is_kept[page_id]:
                    raise InvariantError(f"page pool: page {page_id} is blank and cannot be shared")
                num_cached += 1
            holders[page_id] = num_holders + 1
        self._num_cached -= num_cached

    def give_back(self, page_ids: Seq[int]) -> None:
        """Remove a holder from one sequence's pages; of those, the last ones are evicted first."""
        holders, is_kept, cached = self._num_holders, self._is_kept, list[int]()
        for page_id in reversed(page_ids):
            num_left = holders[page_id] - 1
            if num_left < 0:
                raise InvariantError(f"page pool: page {page_id} is given back and nobody holds it")
            holders[page_id] = num_left
            if num_left:
                continue
            if is_kept[page_id]:
                cached.append(page_id)
            else:
                self._blank.append(page_id)
        self._num_cached += len(cached)
        self._enter_line(cached)

    def _enter_line(self, page_ids: Seq[int]) -> None:
        place, num_pages, last = self._next_place, self.num_pages, self._last_place
        for page_id in page_ids:
            last[page_id] = place + page_id
            place += num_pages
        self._line += [last[page_id] for page_id in page_ids]
        self._next_place = place
        if len(self._line) + len(self._looked_at) > num_pages:
            self._shorten_line(2 * len(page_ids))

    def _shorten_line(self, num_places: int) -> None:
        """Look at so many places, and drop those that no longer count."""
        line = self._line
        seen = [line.popleft() for _ in range(min(num_places, len(line)))]
        self._looked_at += filter(self._counts, seen)
        if not line:  # from the beginning again
            self._line, self._looked_at = self._looked_at, line

    def keep(self, page_id: int) -> None:
        """The prefix cache knows this held page now: once free, it stays findable until taken."""
        if not self._num_holders[page_id]:
            raise InvariantError(f"page pool: page {page_id} is to be kept and nobody holds it")
        self._is_kept[page_id] = True
        if self.local is not None:
            self.local.keep(page_id)

    def forget(self, page_id: int) -> None:
        """The prefix cache no longer knows this page."""
        if not self._is_kept[page_id]:
            raise InvariantError(f"page pool: page {page_id} is to be forgotten and is not kept")
        self._is_kept[page_id] = False
        if self.local is not None:
            self.local.forget(page_id)
        if not self._num_holders[page_id]:
            self._num_cached -= 1
            self._blank.append(page_id)

    @property
    def num_kept(self) -> int:
        """Pages known to the prefix cache, held or not."""
        return self._is_kept.count(True)

    def is_kept(self, page_id: int) -> bool:
        return bool(self._is_kept[page_id])

    def kept_pages(self) -> np.ndarray:
        """By page, 1 where the prefix cache knows it: a view, good until the next change."""
        return np.frombuffer(self._is_kept, np.uint8)

    def is_blank(self, page_id: int) -> bool:
        """Nobody holds the page and nobody knows what is in it."""
        return not self._num_holders[page_id] and not self._is_kept[page_id]

    def check(self) -> None:
        """Compare the whole bookkeeping with itself; costs a walk over all pages.

        Raises:
            InvariantError: a page is lost, or in two states at once.
        """
        places = Counter(self._blank)
        states = [*zip(self._num_holders, self._is_kept, strict=True)]
        cached = [page_id for page_id, (n, is_kept) in enumerate(states) if is_kept and not n]
        places.update(cached)
        places.update([page_id for page_id, (n, _) in enumerate(states) if n])
        if places[0] or self._is_kept[0]:
            raise InvariantError("page pool: the null page was handed out")
        for page_id in range(1, self.num_pages):
            if places[page_id] != 1:
                raise InvariantError(
                    f"page pool: page {page_id} is in {places[page_id]} of blank, cached, held"
                )
        if min(self._num_holders) < 0:
            raise InvariantError("page pool: a page has fewer than 0 holders")
        if len(cached) != self._num_cached or not self._line_has(cached):
            raise InvariantError(f"page pool: pages {cached} are cached and counted wrongly")

    def _line_has(self, cached: Seq[int]) -> bool:
        """Whether the last places of all of these are in line, each once."""
        counts = Counter((*self._looked_at, *self._line))
        return all([counts[self._last_place[page_id]] == 1 for page_id in cached])

    def check_holders(self, page_lists: Iterable[Seq[int]]) -> None:
        """Compare the reference counts with the page lists of everyone who holds pages.

        Raises:
            InvariantError: a count differs.
        """
        counts: Counter[int] = Counter()
        for page_ids in page_lists:
            counts.update(page_ids)
        for page_id, holders in enumerate(self._num_holders):
            if counts[page_id] != holders:
                raise InvariantError(
                    f"page pool: page {page_id} counts {holders} holders, {counts[page_id]} hold it"
                )
