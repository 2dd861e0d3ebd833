"""Runs of cached pages that are found with one look."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpaged.core.cached_page import CachedPage, token_bytes_of
from jaxpaged.core.sequence import Parent, Sequence
from jaxpaged.errors import InvariantError


@dataclass(eq=False, slots=True)
class Stretch:
    """Pages on the device, each of which follows the one before."""

    parent: Parent  # what the first one follows
    prefix: Parent  # what comes next follows this
    page_ids: list[int]
    token_bytes: bytes


class Stretches:
    """Remembers stretches while all their pages stay: thousands of single looks take milliseconds.

    Owned by the prefix cache.
    """

    def __init__(self, pages: Mapping[bytes, CachedPage], page_size: int):
        self.num_pages = 64  # of a stretch; it begins at a multiple of that in its sequence
        self._pages, self._page_size = pages, page_size  # all that can be found, by key
        self._known: dict[bytes, Stretch] = {}  # by the key of the last page

    def find(self, seq: Sequence, first: int, most: int, parent: Parent) -> list[int] | None:
        """The pages on the device with the sequence's tokens from its page `first` on, up to the
        first that does not follow; all of them have hashes. None if one has other tokens.
        """
        page_ids, page_size = list[int](), self._page_size
        while first < most:
            end = min(first - first % self.num_pages + self.num_pages, most)
            known = self._known.get(seq.page_hashes[end - 1])
            if known is None or known.parent != parent or end - first < self.num_pages:
                known = self._walk(seq.page_hashes[first:end], parent)
            num_found = len(known.page_ids)
            own = token_bytes_of(seq, first * page_size, (first + num_found) * page_size)
            if known.token_bytes != own:
                return None
            page_ids += known.page_ids
            if num_found < end - first:
                break
            first, parent = end, known.prefix
        return page_ids

    def remember(self, seq: Sequence, num_before: int, num_pages: int) -> None:
        """A sequence has registered pages after its first `num_before`: `num_pages` now."""
        length = self.num_pages
        for end in range(num_before - num_before % length + length, num_pages + 1, length):
            keys = seq.page_hashes[end - length : end]
            if first := self._pages.get(keys[0]):
                self._walk(keys, first.parent)

    def drop(self, page: CachedPage) -> None:
        """A page leaves the device."""
        if page.stretch:
            self._known.pop(page.stretch, None)
            page.stretch = b""

    def check(self, by_page: Mapping[int, CachedPage]) -> None:
        """Compare with the pages themselves.

        Raises:
            InvariantError: one of a stretch is elsewhere, or does not follow the one before.
        """
        for key, stretch in self._known.items():
            prefix = stretch.parent
            for page_id in stretch.page_ids:
                page = by_page.get(page_id)
                if page is None or page.parent != prefix or page.stretch != key:
                    raise InvariantError(f"prefix cache: page {page_id} left the stretch it is in")
                prefix = page.prefix_id

    def _walk(self, keys: list[bytes], parent: Parent) -> Stretch:
        """Look at pages one by one, up to the first that does not follow."""
        get, found, prefix = self._pages.get, list[CachedPage](), parent
        for key in keys:
            page = get(key)
            if page is None or page.parent != prefix or not page.page_id:
                break
            found.append(page)
            prefix = page.prefix_id
        token_bytes = b"".join([page.token_bytes for page in found])
        stretch = Stretch(parent, prefix, [page.page_id for page in found], token_bytes)
        # of stretches that begin alike one is remembered
        is_new = not any([page.stretch in self._known for page in found])
        if len(found) == self.num_pages and is_new:
            self._known[keys[-1]] = stretch
            for page in found:
                page.stretch = keys[-1]
        return stretch
