"""Answers followed token by token in their grammars, and the masks of a whole step."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.text.grammar import CompiledGrammar, Grammars
from jaxpaged.text.grammars.endings import DEAD, Endings


class GrammarMatcher:
    """Follows one answer. Owned by the engine's thread."""

    def __init__(self, compiled: CompiledGrammar, grammars: Grammars):
        self._compiled, self._grammars = compiled, grammars
        self.ll = compiled.matcher.deep_copy()
        self._num_walked = 0  # tokens that `_place` stands behind
        self._place, self._epoch = DEAD, 0

    @property
    def can_end(self) -> bool:
        """What has been accepted is a whole answer."""
        return self.ll.is_accepting()

    @property
    def must_end(self) -> bool:
        """It is a whole answer and nothing may follow."""
        return self.ll.is_stopped() and not self.ll.is_error()

    def accept(self, token_id: int) -> bool:
        """Take a token; False where the grammar does not allow it, and then for good."""
        return self.ll.consume_token(token_id)

    def closing_mask(self, token_ids: Sequence[int], budget: int) -> np.ndarray | None:
        """The tokens after which the answer can still end, where that is in question.

        Args:
            token_ids: all that were accepted.
            budget: tokens that may still come, the next one included.

        Returns:
            u32 words as `mask_words` makes them; None where any token that the grammar allows will
            do.
        """
        endings = self._compiled.endings
        most = None if endings is None else endings.most
        if endings is None or (most is not None and budget > most):
            return None
        place = self._walk(endings, token_ids)
        if place == DEAD or endings.is_safe(place, budget):
            return None
        return endings.mask(place, budget, self._grammars.eos_ids)

    def _walk(self, endings: Endings, token_ids: Sequence[int]) -> int:
        endings.forget_if_full()
        if self._epoch != endings.epoch:
            self._epoch, self._place, self._num_walked = endings.epoch, endings.start, 0
        for token_id in token_ids[self._num_walked :]:
            self._place = endings.advance(self._place, endings.tree.bytes_of(token_id))
        self._num_walked = len(token_ids)
        return self._place


class MaskFiller:
    """Computes the masks of a step's rows, many at once. Owned by the engine's thread."""

    def __init__(self, grammars: Grammars):
        self.grammars = grammars

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _eos_words(self) -> tuple[np.ndarray, np.ndarray]:
        ids = self.grammars.eos_ids
        return ids // 32, (np.uint32(1) << (ids % 32).astype(np.uint32))

    def fill(
        self, mask: np.ndarray, rows: Sequence[tuple[int, GrammarMatcher, Sequence[int], int, bool]]
    ) -> None:
        """Fill rows of `mask`, u32[seqs, words].

        Args:
            rows: of each its number, its matcher, the tokens accepted, the tokens that may still
                come, and whether it must not end where it can go on.
        """
        open_rows: list[tuple[LLMatcher, int]] = []
        for number, matcher, token_ids, budget, _ in rows:
            closing = matcher.closing_mask(token_ids, budget)
            if closing is None:
                open_rows.append((matcher.ll, number))
            else:
                mask[number] = closing
        if open_rows:
            fill_next_token_bitmask_par(self._executor, open_rows, mask.view(np.int32))
        words, bits = self._eos_words
        for number, _, _, _, goes_on in rows:
            if goes_on:
                without = mask[number].copy()
                np.bitwise_and.at(without, words, ~bits)
                if without.any():
                    mask[number] = without
