"""Reasoning before an answer that is held to a grammar: the grammar begins where it ends.

Until then anything goes but an end of text, and but a token in which the answer would begin beside
the closing mark. When the tokens run low the closing mark is forced, so that the answer still fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.text.grammar import CompiledGrammar, Grammars


@dataclass(frozen=True, eq=False)
class ReasoningTokens:
    """How the marks of reasoning stand in one vocabulary."""

    begin_id: int | None  # None where the opening mark is no single token
    end: bytes
    end_ids: tuple[int, ...]
    # u32 words of masks: what may come once so many bytes of the closing mark stand at the end
    allowed: tuple[np.ndarray, ...]


def reasoning_tokens(vocabulary: Grammars, begin: str, end: str) -> ReasoningTokens:
    """Looks through the vocabulary once, which takes a while; it is kept there."""
    found = vocabulary.reasoning.get((begin, end))
    if not isinstance(found, ReasoningTokens):
        begin_ids, data = vocabulary.encode(begin), end.encode()
        found = ReasoningTokens(
            begin_ids[0] if len(begin_ids) == 1 else None,
            data,
            tuple(vocabulary.encode(end)),
            _allowed(vocabulary, data),
        )
        vocabulary.reasoning[begin, end] = found
    return found


def _allowed(vocabulary: Grammars, end: bytes) -> tuple[np.ndarray, ...]:
    masks = [vocabulary.words_without_eos.copy() for _ in end]
    for token_id, data in enumerate(vocabulary.token_bytes):
        if end[-1:] not in data:
            continue
        for num_before, mask in enumerate(masks):
            _, is_closed, answer = (end[:num_before] + data).partition(end)
            if is_closed and answer.strip():
                mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return tuple(masks)


class ReasoningGate:
    """Follows one answer until its reasoning has ended. Owned by the engine's thread.

    Args:
        is_open: the prompt has opened the reasoning; else the answer's first token may.
        max_tokens: of the reasoning between the marks, None for no limit.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        tokens: ReasoningTokens,
        *,
        is_open: bool,
        max_tokens: int | None,
    ):
        self._tokens, self._is_open = tokens, is_open
        self._all_bytes = compiled.vocabulary.token_bytes
        self._needed = len(tokens.end_ids) + (compiled.shortest or 1)
        self._tail = b""  # the last bytes, one fewer than the closing mark has
        self._most = max_tokens
        self._num_thoughts = 0  # tokens between the marks
        self._closes, self._num_closing = False, 0  # the closing mark is forced; its tokens so far
        self.num_tokens = 0  # of the reasoning, both marks included

    def opening_id(self, budget: int) -> int | None:
        """A token that the answer may open reasoning with beside what its grammar allows."""
        return self._tokens.begin_id if budget > self._needed else None

    @property
    def is_undecided(self) -> bool:
        """The next token says whether there is any reasoning."""
        return not self._is_open

    def mask(self, budget: int) -> np.ndarray:
        """u32 words of what may come next, where `budget` tokens may."""
        is_over = self._most is not None and self._num_thoughts >= self._most
        self._closes = self._closes or is_over or budget <= self._needed
        if self._closes:
            token_id = self._tokens.end_ids[self._num_closing]
            words = np.zeros_like(self._tokens.allowed[0])
            words[token_id // 32] = np.uint32(1 << token_id % 32)
            return words
        end = self._tokens.end
        num_begun = next((n for n in range(len(end) - 1, 0, -1) if self._tail.endswith(end[:n])), 0)
        return self._tokens.allowed[num_begun]

    def passes(self, token_ids: Sequence[int]) -> int | None:
        """Read new tokens; how many of them the reasoning took once it has ended, else None."""
        end = self._tokens.end
        for place, token_id in enumerate(token_ids):
            if not self._is_open:
                if token_id != self._tokens.begin_id:
                    return place
                self._is_open = True
            else:
                self._num_closing += self._closes
                self._num_thoughts += 1
                text = self._tail + self._all_bytes[token_id]
                if end in text:
                    self.num_tokens += 1
                    return place + 1
                self._tail = text[-len(end) + 1 :]
            self.num_tokens += 1
        return None
