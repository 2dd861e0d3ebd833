"""Which replica gets a request: one that holds its beginning, unless that has much more to do.

The rule. A request weighs its answers, and one more for every 1,024 tokens of its prompt, for as
long as it is open; a replica's load is what its open requests weigh. The replica with the least
load is chosen, but one that got a prompt with the same beginning before counts as if its load were
lower by 4, and by 1 more for every 256 tokens of that beginning. Between equals the one that was
sent fewer requests wins.

Beginnings are known by hashes of their leading 1, 2, 4, 8, ... pages; the last 65,536 of those are
remembered, whatever the number of requests.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

PROMPT_TOKENS_PER_ROW = 1024
MATCH_ROWS = 4
MATCHED_TOKENS_PER_ROW = 256
MOST_PREFIXES = 2**16
_KEY_BYTES = 16
_TOKEN_BYTES = 4


class Prefix(NamedTuple):
    """A prompt's first `num_tokens` tokens, in whole pages."""

    key: bytes
    num_tokens: int


def prefixes_of(token_ids: Sequence[int], page_size: int, salt: str) -> list[Prefix]:
    """The leading 1, 2, 4, ... pages of a prompt, as far as they are full."""
    data = array("i", token_ids).tobytes()
    hashed = hashlib.blake2b(salt.encode(), digest_size=_KEY_BYTES)
    found, start, num_tokens = list[Prefix](), 0, page_size
    while num_tokens <= len(token_ids):
        end = num_tokens * _TOKEN_BYTES
        hashed.update(data[start:end])
        found.append(Prefix(hashed.digest(), num_tokens))
        start, num_tokens = end, 2 * num_tokens
    return found


def weight_of(num_prompt_tokens: int, num_answers: int) -> float:
    """What a request adds to its replica's load while it is open."""
    return num_answers + num_prompt_tokens / PROMPT_TOKENS_PER_ROW


class Router:
    """Loads and known beginnings of `num_replicas` replicas. Owned by the front."""

    def __init__(self, num_replicas: int, most_prefixes: int = MOST_PREFIXES):
        self.loads = [0.0] * num_replicas
        self._num_sent = [0] * num_replicas
        self._most_prefixes = most_prefixes
        # who was sent what begins so: a bit a replica, the longest unused first
        self._holders: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Beginnings that are remembered."""
        return len(self._holders)

    def choose(self, prefixes: Sequence[Prefix], among: Collection[int]) -> int:
        """The replica for a prompt that begins so; `among` must not be empty."""
        holders = [self._holders.get(prefix.key, 0) for prefix in prefixes]

        def rank(replica: int) -> tuple[float, int]:
            matched = 0
            for mask, prefix in zip(holders, prefixes, strict=True):
                if mask >> replica & 1:
                    matched = prefix.num_tokens
            bonus = MATCH_ROWS + matched / MATCHED_TOKENS_PER_ROW if matched else 0.0
            return self.loads[replica] - bonus, self._num_sent[replica]

        return min(among, key=rank)

    def sent(self, replica: int, prefixes: Sequence[Prefix], weight: float) -> None:
        """Note that a request has gone to a replica."""
        self.loads[replica] += weight
        self._num_sent[replica] += 1
        for prefix in prefixes:
            self._holders[prefix.key] = self._holders.pop(prefix.key, 0) | 1 << replica
        while len(self._holders) > self._most_prefixes:
            self._holders.popitem(last=False)

    def ended(self, replica: int, weight: float) -> None:
        """Note that a request is open there no longer."""
        self.loads[replica] -= weight

    def forget(self, replica: int) -> None:
        """A replica's cache is empty."""
        for key, mask in list(self._holders.items()):
            left = mask & ~(1 << replica)
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
