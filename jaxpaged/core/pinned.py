"""Prefixes whose pages stay in the cache until somebody drops them."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpaged.core.cached_page import SHARED_SALT
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.request import Pin, Request
from jaxpaged.core.sequence import Sequence as TokenSequence
from jaxpaged.errors import RequestError


@dataclass(frozen=True)
class WarmPrefix:
    """A prefix that was computed ahead of its use. Its last page, if begun only, is not kept."""

    prefix_id: str
    cache_salt: str  # whose requests find it; SHARED_SALT: all
    num_tokens: int  # in full pages
    page_ids: tuple[int, ...]
    key_name: str  # of the API key that warmed it
    first_local_page: int = 0  # page from which on local pages are kept too, where there are any

    @property
    def is_shared(self) -> bool:
        return self.cache_salt == SHARED_SALT

    @cached_property
    def page_array(self) -> np.ndarray:
        """`page_ids`, for those who draw them again and again."""
        return np.array(self.page_ids, np.int32)


class PinnedPrefixes:
    """Holds the pages of warm prefixes. Owned by the scheduler.

    Args:
        most_pages: that pins may hold together; the longest sequence must fit beside them.
    """

    def __init__(
        self, pool: PagePool, cache: PrefixCache, most_pages: int, local: LocalPages | None
    ):
        self._pool, self._cache, self._most_pages, self._local = pool, cache, most_pages, local
        self._pinned: dict[str, WarmPrefix] = {}

    def __iter__(self) -> Iterator[WarmPrefix]:
        return iter(list(self._pinned.values()))

    @property
    def num_pages(self) -> int:
        """Pages that are held, one in several prefixes counted once."""
        return len({page_id for prefix in self for page_id in prefix.page_ids})

    def get(self, prefix_id: str) -> WarmPrefix | None:
        return self._pinned.get(prefix_id)

    def check_room(self, request: Request, pin: Pin) -> None:
        """Refuse a prefix that fills no page, or is too long to be pinned beside the others.

        Raises:
            RequestError: names the pages that it needs and those that are left.
        """
        num_tokens, page_size = len(request.prompt_token_ids), self._pool.page_size
        num_pages, left = num_tokens // page_size, self._num_left(request, pin)
        if not num_pages:
            raise RequestError(
                f"a prefix of {num_tokens} tokens fills no page of {page_size} tokens, and only "
                f"full pages are kept: send {page_size} tokens or more",
                param="prompt",
            )
        if num_pages <= left:
            if self._has_room_for_window(pin):
                return
            raise RequestError(
                f"{len(self._pinned)} prefixes are pinned, and the windows of more would leave no "
                "local pages for the longest sequence: drop one",
                param="prompt",
            )
        why = "the longest sequence must fit beside all pinned ones"
        if pin.share < 1:
            why += f", and one API key may pin {pin.share:.0%} of that"
        allowed = f"allowed are 1 to {left}" if left else "and none may be pinned now"
        raise RequestError(
            f"a prefix of {num_tokens} tokens pins {num_pages} full pages of {page_size} tokens, "
            f"{allowed} ({why}): drop others, or make it fit",
            param="prompt",
        )

    def pin(self, seq: TokenSequence) -> None:
        """Hold the cached pages of a sequence that has just computed its prompt.

        Does nothing where another one took the room meanwhile.
        """
        request, pin = seq.request, seq.request.pin
        assert pin is not None
        self.drop(pin.prefix_id)
        page_ids, first_local = self._cache.find_prompt(seq), 0
        if self._local is not None:
            page_ids = self._local.usable(page_ids)
        if len(page_ids) > self._num_left(request, pin) or not self._has_room_for_window(pin):
            return
        self._pool.share(page_ids)
        num_tokens = len(page_ids) * self._pool.page_size
        if self._local is not None:
            first_local = self._local.first_needed(num_tokens)
            self._local.hold(page_ids[first_local:])
        self._pinned[pin.prefix_id] = WarmPrefix(
            pin.prefix_id,
            request.cache_salt,
            num_tokens,
            tuple(page_ids),
            request.key_name,
            first_local,
        )

    def drop(self, prefix_id: str) -> bool:
        """Let a prefix be evicted like any other; False if there is none of this name."""
        prefix = self._pinned.pop(prefix_id, None)
        if prefix is not None:
            if self._local is not None:
                self._local.release(prefix.page_ids[prefix.first_local_page :])
            self._pool.give_back(prefix.page_ids)
        return prefix is not None

    def _num_left(self, request: Request, pin: Pin) -> int:
        """Pages that a prefix may pin; one of the same name would be replaced by it."""
        others = [prefix for prefix in self if prefix.prefix_id != pin.prefix_id]
        of_key = [prefix for prefix in others if prefix.key_name == request.key_name]
        left = self._most_pages - sum(len(prefix.page_ids) for prefix in others)
        share = int(self._most_pages * pin.share)
        return max(min(left, share - sum(len(prefix.page_ids) for prefix in of_key)), 0)

    def _has_room_for_window(self, pin: Pin) -> bool:
        """Whether the longest sequence finds local pages beside one more prefix."""
        if self._local is None:
            return True
        num_others = len(self._pinned.keys() - {pin.prefix_id})
        held = (num_others + 1) * self._local.most_of_decode
        return held + self._local.most_of_one <= self._local.pool.num_usable

    def drop_all(self) -> None:
        for prefix in self:
            self.drop(prefix.prefix_id)


def prefix_id_of(token_ids: Sequence[int], cache_salt: str, adapter_id: str = "") -> str:
    """The same name for the same tokens, salt and adapter, on every engine."""
    digest = hashlib.sha256(repr((cache_salt, adapter_id)).encode())
    digest.update(_as_bytes(token_ids))
    return f"prefix-{digest.hexdigest()[:24]}"


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
