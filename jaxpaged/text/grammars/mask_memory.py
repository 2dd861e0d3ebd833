"""Memory of the masks that all grammars of a tokenizer keep together."""

import weakref
from collections import OrderedDict
from typing import Protocol

MAX_WORDS = 1 << 26  # 256 MB
COUNTS = 64  # how often words are counted while so many come


class KeepsMasks(Protocol):
    """Masks in order of use."""

    num_mask_words: int

    def forget_masks(self, num_left: int) -> None:
        """Drop the oldest, until at most so many words are left."""
        ...


class MaskMemory:
    """Bounds the words of all. Who added none for longest loses all, then the next one.

    Used by one thread at a time. Who is not referred to elsewhere any more does not count.
    """

    def __init__(self, most_words: int = MAX_WORDS):
        self._most_words, self._num_new = most_words, 0
        self._users: OrderedDict[int, weakref.ref[KeepsMasks]] = OrderedDict()

    def added(self, user: KeepsMasks, num_words: int) -> None:
        """`user` keeps so many words more."""
        self._users[id(user)] = weakref.ref(user)
        self._users.move_to_end(id(user))
        self._num_new += num_words
        if self._num_new * COUNTS >= self._most_words:
            self._num_new = 0
            self._make_room()

    def _make_room(self) -> None:
        users = [(key, user) for key, ref in self._users.items() if (user := ref()) is not None]
        self._users = OrderedDict((key, weakref.ref(user)) for key, user in users)
        total = sum(user.num_mask_words for _, user in users)
        for _, user in users:
            if total <= self._most_words:
                return
            before = user.num_mask_words
            user.forget_masks(before // 2 if user is users[-1][1] else 0)
            total -= before - user.num_mask_words
