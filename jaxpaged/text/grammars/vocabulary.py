"""A tokenizer's tokens as a tree of their bytes."""

from collections.abc import Sequence

import numpy as np


class TokenTree:
    """Every token's bytes, shared beginnings once. Nodes are numbered level by level, 0 the root.

    Args:
        tokens: bytes by token id; empty where an id may never be sampled.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._tokens = tokens
        nodes: dict[bytes, int] = {b"": 0}
        for token in set(tokens):
            for end in range(len(token), 0, -1):
                if token[:end] in nodes:
                    break
                nodes[token[:end]] = 0
        ordered = sorted(nodes, key=lambda prefix: (len(prefix), prefix))
        nodes = {prefix: number for number, prefix in enumerate(ordered)}
        self.longest = len(ordered[-1])
        lengths = np.array([len(prefix) for prefix in ordered])
        self.levels = np.searchsorted(lengths, np.arange(self.longest + 2))  # first node of each
        self.parent = np.array([nodes[p[:-1]] for p in ordered], np.int32)
        self.byte = np.array([p[-1] if p else 0 for p in ordered], np.uint8)
        self.node_of = np.array([nodes[token] for token in tokens], np.int32)  # 0: no token
        self.is_token = np.zeros(len(ordered), bool)
        self.is_token[self.node_of] = True
        self.is_token[0] = False
        self._children = dict(
            zip((self.parent * 256 + self.byte).tolist()[1:], range(1, len(ordered)), strict=True)
        )
        singles = [self.is_token[self.child(0, byte)] for byte in range(256)]
        self._num_singles = np.concatenate([[0], np.cumsum(singles)]).tolist()

    def child(self, node: int, byte: int) -> int:
        """The node one byte further, 0 for none."""
        return self._children.get(node * 256 + byte, 0)

    def has_single(self, low: int, high: int) -> bool:
        """Some byte from `low` to `high` is a token by itself."""
        return self._num_singles[high + 1] > self._num_singles[low]

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokens[token_id]
