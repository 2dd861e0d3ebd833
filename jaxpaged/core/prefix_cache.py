"""Pages found again by all the tokens up to their end."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from jaxpaged.core.cached_page import (
    SHARED_SALT,
    Begun,
    CachedPage,
    parent_after,
    seed_of,
    token_bytes_of,
)
from jaxpaged.core.hashing import (
    HASH_BITS,
    TOKEN_BYTES,
    as_bytes,
    next_hash,
    page_hashes,
    root_hash,
    shortened,
)
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.sequence import Parent, Sequence
from jaxpaged.core.stretches import Stretches
from jaxpaged.errors import InvariantError


class PrefixCache:
    """Finds the longest run of leading pages that somebody computed before. Owned by the scheduler.

    A hash only points to a candidate: it counts when token ids, parent and salt are the same, so a
    collision costs a miss and never a wrong answer. `hash_bits` shortens the hash, for tests.

    A page may be found before the device has filled it: steps run in the order of their plans, and
    within a step every layer writes all KV before it attends.
    """

    def __init__(self, pool: PagePool, hash_bits: int = HASH_BITS):
        self.pool = pool
        self.num_query_tokens = 0  # tokens looked up at first admission
        self.num_hit_tokens = 0  # tokens of those that were found
        self._hash_bits = hash_bits
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._stretches = Stretches(self._by_key, pool.page_size)
        # pages begun by sequences whose followers copy them: exact tokens only, no hash
        self._begun: dict[tuple[Parent, bytes], tuple[int, int]] = {}  # page id, step
        self._begun_keys: dict[int, tuple[Parent, bytes]] = {}
        self.step = 0  # number of the plan being made; a copy reads what earlier ones wrote
        self._longest_shared = 0  # pages; 0 while nobody registered a prefix for all
        self._last_prefix_id = 0  # ids are never used twice: a page's parent may be gone
        self.on_lost: Callable[[CachedPage], None] = _nobody_listens  # told of pages off the device
        pool.on_evict = self._on_evict

    def __len__(self) -> int:
        return len(self._by_page)

    def find(self, seq: Sequence, first: int = 0) -> list[int]:
        """The pages that hold the sequence's tokens from its page `first` on.

        All its pages before must be registered. One token at least stays to compute.
        """
        return self._find(seq, first, (len(seq.token_ids) - 1) // self.pool.page_size)

    def find_prompt(self, seq: Sequence) -> list[int]:
        """The pages that hold the sequence's prompt, all that are full."""
        return self._find(seq, 0, seq.num_prompt_tokens // self.pool.page_size)

    def _find(self, seq: Sequence, first: int, most: int) -> list[int]:
        page_ids: list[int] = []
        parent: Parent = seq.prefix if first else seq.request.cache_root
        for index in range(first, most):
            may_be_shared = index < self._longest_shared and isinstance(parent, tuple)
            if not may_be_shared and self._hash_bits == HASH_BITS:
                if len(seq.page_hashes) < most:
                    self._extend_hashes(seq)
                found = self._stretches.find(seq, index, most, parent)
                if found is not None:
                    return page_ids + found
            entry = self._entry_at(seq, index, parent)
            if entry is None or not entry.page_id:
                break
            page_ids.append(entry.page_id)
            parent = parent_after(entry, seq)
        return page_ids

    def find_begun(self, seq: Sequence, page_ids: list[int]) -> Begun | None:
        """A page to copy after the full pages `page_ids`, with all that is known of the sequence,
        or all but the last token, which stays to compute in any case.
        """
        page_size, num_known = self.pool.page_size, len(seq.token_ids)
        start = len(page_ids) * page_size
        parent: Parent = seq.request.cache_root
        if page_ids:
            parent = parent_after(self._by_page[page_ids[-1]], seq)
        if num_known - start == page_size:
            entry = self._entry_at(seq, len(page_ids), parent)
            if entry is not None and entry.page_id and entry.step < self.step:
                return Begun(entry.page_id, page_size - 1)
        if not 1 < num_known - start <= page_size:
            return None  # with one token beyond the full pages there is nothing to copy
        for end in (num_known, num_known - 1):
            found = self._begun.get((parent, as_bytes(seq.token_ids[start:end])))
            if found is not None and found[1] < self.step:
                return Begun(found[0], min(end, num_known - 1) - start)
        return None

    def find_off_device(self, seq: Sequence, page_ids: Seq[int]) -> list[CachedPage]:
        """The pages in host memory that follow those that `find` found."""
        found: list[CachedPage] = []
        parent: Parent = seq.request.cache_root
        if page_ids:
            parent = parent_after(self._by_page[page_ids[-1]], seq)
        for index in range(len(page_ids), (len(seq.token_ids) - 1) // self.pool.page_size):
            page = self._entry_at(seq, index, parent)
            if page is None or page.page_id:
                break
            found.append(page)
            parent = parent_after(page, seq)
        return found

    def pages(self) -> Iterable[CachedPage]:
        """All that can be found."""
        return self._by_key.values()

    def pages_of(self, page_ids: Iterable[int]) -> list[CachedPage]:
        """What can be found of these pages of the pool."""
        return [self._by_page[page_id] for page_id in page_ids if page_id in self._by_page]

    def put_back(self, seq: Sequence, pages: Seq[CachedPage], page_ids: Iterable[int]) -> None:
        """Pages are to be on the device again, as a sequence's own after its shared ones."""
        for page, page_id in zip(pages, page_ids, strict=True):
            self._enter_pool(page, page_id)
        seq.num_registered_pages = seq.num_shared_pages = seq.num_shared_pages + len(pages)
        seq.prefix = parent_after(pages[-1], seq)

    def share(
        self, seq: Sequence, page_ids: list[int], num_tokens: int, num_off_device: int = 0
    ) -> None:
        """Give a sequence without pages the ones that `find` found for it.

        What `num_tokens` counts beyond these comes from a copy or from host memory, the latter
        `num_off_device` tokens, which the caller plans.
        """
        seq.page_ids = []
        self.extend(seq, page_ids)
        seq.num_computed_tokens = num_tokens
        if seq.num_preemptions == 0:
            self.num_query_tokens += len(seq.token_ids)
            self.num_hit_tokens += num_tokens - num_off_device
            seq.num_cached_tokens, seq.num_host_cached_tokens = num_tokens, num_off_device

    def extend(self, seq: Sequence, page_ids: list[int]) -> None:
        """Give a sequence pages that `find` found after its own, all of which are registered."""
        self.pool.share(page_ids)
        seq.page_ids += page_ids
        seq.num_computed_tokens = len(seq.page_ids) * self.pool.page_size
        seq.num_registered_pages = seq.num_shared_pages = len(seq.page_ids)
        if page_ids:
            seq.prefix = parent_after(self._by_page[page_ids[-1]], seq)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full pages among the first `num_tokens` tokens findable.

        All of these must be read by the host, and computed by a step that is planned already.
        """
        page_size, first = self.pool.page_size, seq.num_registered_pages
        num_pages, hashes = num_tokens // page_size, seq.page_hashes
        if len(hashes) < first:
            hashes = self._extend_hashes(seq)
        if seq.request.cache_root[0] == SHARED_SALT:
            self._longest_shared = max(self._longest_shared, num_pages)
        page_bytes = page_size * TOKEN_BYTES
        token_bytes = token_bytes_of(seq, first * page_size, num_pages * page_size)
        for index in range(first, num_pages):
            parent = seq.prefix if index else seq.request.cache_root
            at = (index - first) * page_bytes
            own = token_bytes[at : at + page_bytes]
            if len(hashes) == index:
                before = hashes[-1] if index else root_hash(seed_of(seq.request.cache_root))
                hashes.append(next_hash(before, own))
            key = self._key(hashes[index])
            seq.prefix = self._enter(seq, key, seq.page_ids[index], parent, own)
            seq.num_registered_pages = index + 1
        self._stretches.remember(seq, first, num_pages)

    def register_begun(self, seq: Sequence, num_tokens: int) -> None:
        """Make the page that the first `num_tokens` tokens end in findable by its followers.

        The full pages before it must be registered.
        """
        index, num_begun = divmod(num_tokens, self.pool.page_size)
        if not num_begun or seq.num_registered_pages != index:
            return
        parent = seq.prefix if index else seq.request.cache_root
        key = (parent, as_bytes(seq.token_ids[num_tokens - num_begun : num_tokens]))
        page_id = seq.page_ids[index]
        if key not in self._begun and page_id not in self._begun_keys:
            self._begun[key], self._begun_keys[page_id] = (page_id, self.step), key
            self.pool.keep(page_id)

    def forget_pages(self, page_ids: Seq[int]) -> None:
        """Make these pages unfindable: what is in them must not be used."""
        for page_id in page_ids:
            if page_id in self._by_page or page_id in self._begun_keys:
                self._on_evict(page_id)
                self.pool.forget(page_id)

    def forget(self, page: CachedPage) -> None:
        """Make a page unfindable, wherever it is."""
        if page.page_id:
            self.forget_pages([page.page_id])
        else:
            del self._by_key[page.key]
            self.on_lost(page)

    def reset(self) -> None:
        """Forget all pages. Those that are held stay with their holders."""
        self.forget_pages([*self._by_page, *self._begun_keys])
        for page in list(self._by_key.values()):
            self.forget(page)

    def check(self) -> None:
        """Compare both directions and the pool's marks.

        Raises:
            InvariantError: they disagree.
        """
        if {page.page_id for page in self._by_key.values() if page.page_id} != self._by_page.keys():
            raise InvariantError("prefix cache: the two directions name different pages")
        if {page_id: key for key, (page_id, _) in self._begun.items()} != self._begun_keys:
            raise InvariantError("prefix cache: begun pages are named differently both ways")
        known = self._by_page.keys() | self._begun_keys.keys()
        lost = [page_id for page_id in known if not self.pool.is_kept(page_id)]
        if lost or len(known) != self.pool.num_kept:
            raise InvariantError(f"prefix cache: the pool keeps other pages; lost {lost}")
        self._stretches.check(self._by_page)

    def _enter(
        self, seq: Sequence, key: bytes, page_id: int, parent: Parent, token_bytes: bytes
    ) -> Parent:
        entry = self._by_key.get(key)
        if entry is not None:
            if entry.parent == parent and entry.token_bytes == token_bytes:
                if not entry.page_id:  # computed anew, for whatever reason
                    self.on_lost(entry)
                    entry.step = self.step
                    self._enter_pool(entry, page_id)
                return entry.prefix_id  # somebody else computed the same; this copy stays private
            # a collision, or a page that lost its parent: the newer one stays
            self.forget(entry)
        self._last_prefix_id += 1
        is_shared = seq.request.cache_root[0] == SHARED_SALT
        prefix_id = self._last_prefix_id
        entry = CachedPage(key, page_id, prefix_id, parent, token_bytes, is_shared, self.step)
        self._by_key[key] = entry
        self._enter_pool(entry, page_id)
        return entry.prefix_id

    def _enter_pool(self, page: CachedPage, page_id: int) -> None:
        page.page_id, self._by_page[page_id] = page_id, page
        self.pool.keep(page_id)

    def _entry_at(self, seq: Sequence, index: int, parent: Parent) -> CachedPage | None:
        """The page with the sequence's tokens at `index` that follows `parent`."""
        token_bytes = self._page_bytes(seq, index)
        if index < self._longest_shared:
            before: Parent = parent
            if not index:
                before = (SHARED_SALT, seq.request.adapter_id)
            elif isinstance(parent, tuple) and isinstance(parent[0], int):
                before = parent[0]
            entry = self._by_key.get(self._key(self._shared_hash(seq, index)))
            if entry and entry.parent == before and entry.token_bytes == token_bytes:
                return entry
        if len(seq.page_hashes) <= index:
            self._extend_hashes(seq)
        entry = self._by_key.get(self._key(seq.page_hashes[index]))
        if entry and entry.parent == parent and entry.token_bytes == token_bytes:
            return entry
        return None

    def _page_bytes(self, seq: Sequence, index: int) -> bytes:
        page_size = self.pool.page_size
        return token_bytes_of(seq, index * page_size, (index + 1) * page_size)

    def _on_evict(self, page_id: int) -> None:
        entry = self._by_page.pop(page_id, None)
        if entry is not None:
            self._stretches.drop(entry)
            if entry.chunk_id:
                entry.page_id = 0
            else:
                del self._by_key[entry.key]
        key = self._begun_keys.pop(page_id, None)
        if key is not None:
            del self._begun[key]

    def _extend_hashes(self, seq: Sequence) -> list[bytes]:
        salt, known = seed_of(seq.request.cache_root), seq.page_hashes
        seq.page_hashes = page_hashes(seq.token_ids, self.pool.page_size, salt, known)
        return seq.page_hashes

    def _shared_hash(self, seq: Sequence, index: int) -> bytes:
        if len(seq.shared_hashes) <= index:
            # the first page tells most sequences that they share nothing
            num_tokens = (self._longest_shared if index else 1) * self.pool.page_size
            salt = seed_of((SHARED_SALT, seq.request.adapter_id))
            seq.shared_hashes = page_hashes(seq.token_ids[:num_tokens], self.pool.page_size, salt)
        return seq.shared_hashes[index]

    def _key(self, page_hash: bytes) -> bytes:
        return shortened(page_hash, self._hash_bits)


def _nobody_listens(page: CachedPage) -> None:
    pass
