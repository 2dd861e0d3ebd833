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
        ordered = sorted(set(tokens) - {b""})
        lengths = np.array([len(token) for token in ordered])
        self.longest = int(lengths.max(initial=1))
        size = self.longest
        joined = b"".join([token.ljust(size, b"\0") for token in ordered])
        letters = np.frombuffer(joined, np.uint8).reshape(len(ordered), size)
        shared = _num_shared(letters, lengths)
        parents, letter_of = [np.zeros(1, np.int32)], [np.zeros(1, np.uint8)]
        node_of = np.zeros(len(ordered), np.int32)  # of the beginning looked at, then of the whole
        levels = [0, 1]
        for depth in range(1, size + 1):
            rows = np.flatnonzero(lengths >= depth)
            is_new = np.ones(len(rows), bool)
            is_new[1:] = (np.diff(rows) > 1) | (shared[rows[1:] - 1] < depth)
            firsts = rows[is_new]
            parents.append(node_of[firsts])
            letter_of.append(letters[firsts, depth - 1])
            node_of[rows] = levels[-1] + np.cumsum(is_new) - 1
            levels.append(levels[-1] + len(firsts))
        self.parent, self.byte = np.concatenate(parents), np.concatenate(letter_of)
        node_by_token = dict(zip(ordered, node_of.tolist(), strict=True)) | {b"": 0}
        self.node_of = np.array([node_by_token[token] for token in tokens], np.int32)  # 0: none
        self.is_token = np.zeros(levels[-1], bool)
        self.is_token[node_of] = True
        # a node's children stand together in the next level
        self._first_child = np.searchsorted(self.parent[1:], np.arange(levels[-1] + 1)) + 1
        keys = self.parent.astype(np.int64) * 256 + self.byte
        self._children = dict(zip(keys.tolist()[1:], range(1, levels[-1]), strict=True))
        singles = [self.is_token[self.child(0, byte)] for byte in range(256)]
        self._num_singles = np.concatenate([[0], np.cumsum(singles)]).tolist()

    def child(self, node: int, byte: int) -> int:
        """The node one byte further, 0 for none."""
        return self._children.get(node * 256 + byte, 0)

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All children of `nodes`, and of each the place of its parent in `nodes`."""
        firsts, ends = self._first_child[nodes], self._first_child[nodes + 1]
        counts = ends - firsts
        parents = np.repeat(np.arange(len(nodes)), counts)
        offsets = np.arange(len(parents)) - np.repeat(np.cumsum(counts) - counts, counts)
        return firsts[parents] + offsets, parents

    def has_single(self, low: int, high: int) -> bool:
        """Some byte from `low` to `high` is a token by itself."""
        return self._num_singles[high + 1] > self._num_singles[low]

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def _num_shared(letters: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many bytes each token has in common with the next one."""
    differs = letters[1:] != letters[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), letters.shape[1])
    return np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
