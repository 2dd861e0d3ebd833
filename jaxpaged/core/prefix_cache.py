"""Pages found again by all the tokens up to their end."""

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.sequence import Sequence
from jaxpaged.errors import InvariantError

_HASH_BITS = 256
_TOKEN_BYTES = 4


def page_hashes(
    token_ids: Seq[int], page_size: int, salt: str, known: Seq[bytes] = ()
) -> list[bytes]:
    """SHA-256 of every full page, chained: it covers all tokens up to the page's end, and the salt.

    `known` are the hashes of the leading pages, already computed; the result begins with them.
    Touches no shared state, so a tokenizer thread may call it: about 10 ms for 100,000 tokens.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else hashlib.sha256(salt.encode()).digest()
    data = _as_bytes(token_ids[len(hashes) * page_size : len(token_ids) // page_size * page_size])
    page_bytes = page_size * _TOKEN_BYTES
    for start in range(0, len(data), page_bytes):
        parent = hashlib.sha256(parent + data[start : start + page_bytes]).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class _Entry:
    """One page that can be found. `prefix_id` names its content, all pages before it included."""

    key: bytes
    page_id: int
    prefix_id: int
    parent: int | str  # prefix id of the page before; of the first page, the salt
    token_bytes: bytes


class PrefixCache:
    """Finds the longest run of leading pages that somebody computed before. Owned by the scheduler.

    A hash only points to a candidate: it counts when token ids, parent and salt are the same, so a
    collision costs a miss and never a wrong answer. `hash_bits` shortens the hash, for tests.
    """

    def __init__(self, pool: PagePool, hash_bits: int = _HASH_BITS):
        self.pool = pool
        self.num_query_tokens = 0  # tokens looked up at first admission
        self.num_hit_tokens = 0  # tokens of those that were found
        self._hash_bits = hash_bits
        self._by_key: dict[bytes, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._last_prefix_id = 0  # ids are never used twice: a page's parent may be gone
        pool.on_evict = self._on_evict

    def __len__(self) -> int:
        return len(self._by_page)

    def find(self, seq: Sequence) -> list[int]:
        """The pages that hold the sequence's first tokens; one token at least stays to compute."""
        page_size = self.pool.page_size
        most = (len(seq.token_ids) - 1) // page_size
        if len(seq.page_hashes) < most:
            self._extend_hashes(seq)
        page_ids: list[int] = []
        parent: int | str = seq.request.cache_salt
        for index in range(most):
            entry = self._by_key.get(self._key(seq.page_hashes[index]))
            if entry is None or entry.parent != parent:
                break
            start = index * page_size
            if entry.token_bytes != _as_bytes(seq.token_ids[start : start + page_size]):
                break
            page_ids.append(entry.page_id)
            parent = entry.prefix_id
        return page_ids

    def share(self, seq: Sequence, page_ids: list[int]) -> None:
        """Give a sequence without pages the ones that `find` found for it."""
        self.pool.share(page_ids)
        seq.page_ids = list(page_ids)
        seq.num_computed_tokens = len(page_ids) * self.pool.page_size
        seq.num_registered_pages = len(page_ids)
        if page_ids:
            seq.prefix_id = self._by_page[page_ids[-1]].prefix_id
        if seq.num_preemptions == 0:
            self.num_query_tokens += len(seq.token_ids)
            self.num_hit_tokens += seq.num_computed_tokens
            seq.num_cached_tokens = seq.num_computed_tokens

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full pages among the first `num_tokens` tokens findable.

        All of these must be computed, and read by the host.
        """
        page_size = self.pool.page_size
        num_pages = num_tokens // page_size
        if len(seq.page_hashes) < num_pages:
            self._extend_hashes(seq)
        for index in range(seq.num_registered_pages, num_pages):
            parent = seq.prefix_id if index else seq.request.cache_salt
            token_bytes = _as_bytes(seq.token_ids[index * page_size : (index + 1) * page_size])
            key = self._key(seq.page_hashes[index])
            seq.prefix_id = self._enter(key, seq.page_ids[index], parent, token_bytes)
            seq.num_registered_pages = index + 1

    def reset(self) -> None:
        """Forget all pages. Those that are held stay with their holders."""
        for entry in list(self._by_page.values()):
            self._drop(entry)

    def check(self) -> None:
        """Compare both directions and the pool's marks.

        Raises:
            InvariantError: they disagree.
        """
        if {entry.page_id for entry in self._by_key.values()} != self._by_page.keys():
            raise InvariantError("prefix cache: the two directions name different pages")
        lost = [page_id for page_id in self._by_page if not self.pool.is_kept(page_id)]
        if lost or len(self._by_page) != self.pool.num_kept:
            raise InvariantError(f"prefix cache: the pool keeps other pages; lost {lost}")

    def _enter(self, key: bytes, page_id: int, parent: int | str, token_bytes: bytes) -> int:
        entry = self._by_key.get(key)
        if entry is not None:
            if entry.parent == parent and entry.token_bytes == token_bytes:
                return entry.prefix_id  # somebody else computed the same; this copy stays private
            self._drop(entry)  # a collision, or a page that lost its parent: the newer one stays
        self._last_prefix_id += 1
        entry = _Entry(key, page_id, self._last_prefix_id, parent, token_bytes)
        self._by_key[key] = self._by_page[page_id] = entry
        self.pool.keep(page_id)
        return entry.prefix_id

    def _drop(self, entry: _Entry) -> None:
        del self._by_key[entry.key], self._by_page[entry.page_id]
        self.pool.forget(entry.page_id)

    def _on_evict(self, page_id: int) -> None:
        entry = self._by_page.pop(page_id)
        del self._by_key[entry.key]

    def _extend_hashes(self, seq: Sequence) -> None:
        seq.page_hashes = page_hashes(
            seq.token_ids, self.pool.page_size, seq.request.cache_salt, seq.page_hashes
        )

    def _key(self, page_hash: bytes) -> bytes:
        if self._hash_bits == _HASH_BITS:
            return page_hash
        short = int.from_bytes(page_hash, "big") >> (_HASH_BITS - self._hash_bits)
        return short.to_bytes(_HASH_BITS // 8, "big")


def _as_bytes(token_ids: Seq[int]) -> bytes:
    return array("i", token_ids).tobytes()
