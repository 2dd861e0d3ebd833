"""Answers followed token by token in their grammars, and the masks of a whole step."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.errors import RequestError
from jaxpaged.text.grammar import CompiledGrammar
from jaxpaged.text.grammars.endings import DEAD, Endings


class GrammarMatcher:
    """Follows one answer. Owned by the engine's thread. `failure` says why it cannot go on."""

    def __init__(self, compiled: CompiledGrammar):
        self._endings, self.vocabulary = compiled.endings, compiled.vocabulary
        self.ll = compiled.matcher.deep_copy()
        self.failure: str | None = None
        self._num_walked = 0  # tokens that `_place` stands behind
        self._place, self._epoch = DEAD, 0
        self._safe_above = 0  # no need to look while more tokens than this may come
        if self._endings is not None:
            self._safe_above = self._endings.worst(self._endings.start)

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
        endings = self._endings
        if endings is None or budget > self._safe_above:
            return None
        place = self._walk(endings, token_ids)
        self._safe_above = endings.worst(place)
        if place == DEAD or endings.is_safe(place, budget):
            return None
        return endings.mask(place, budget)

    def place(self, token_ids: Sequence[int]) -> int:
        """Where the answer stands among places that answers come to again; DEAD if unknown."""
        endings = self._endings
        return self._walk(endings, token_ids) if endings and endings.come_again else DEAD

    def told(self, place: int) -> np.ndarray | None:
        """The mask of an earlier answer at this place."""
        return self._endings.told(place) if self._endings and place != DEAD else None

    def tell(self, place: int, mask: np.ndarray) -> None:
        """Keep a mask for later answers at this place, if its number still means the same."""
        endings = self._endings
        if endings and place != DEAD and self._epoch == endings.epoch:
            endings.tell(place, mask)

    def _walk(self, endings: Endings, token_ids: Sequence[int]) -> int:
        endings.forget_if_full()
        if self._epoch != endings.epoch:
            self._epoch, self._place, self._num_walked = endings.epoch, endings.start, 0
        for token_id in token_ids[self._num_walked :]:
            self._place = endings.advance(self._place, endings.tree.bytes_of(token_id))
        self._num_walked = len(token_ids)
        return self._place


class MaskRow(NamedTuple):
    """A row of a step that a grammar narrows."""

    number: int
    matcher: GrammarMatcher
    token_ids: Sequence[int]  # accepted so far
    budget: int  # tokens that may still come
    goes_on: bool  # must not end where it can go on
    also_id: int | None = None  # allowed beside what the grammar allows


class MaskFiller:
    """Computes the masks of a step's rows, many at once. Owned by the engine's thread."""

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def narrow(self, mask: np.ndarray, rows: Sequence[MaskRow]) -> None:
        """Take out of `mask`, u32[seqs, words], what the grammars of `rows` do not allow.

        A row in which nothing is left keeps its mask, and its matcher the reason.
        """
        allowed = self._allowed(rows, mask.shape[1])
        allowed &= mask[[row.number for row in rows]]
        has_left: list[bool] = allowed.any(axis=1).tolist()
        for row, left, has_any in zip(rows, allowed, has_left, strict=True):
            if row.matcher.ll.is_error():
                said = " ".join(row.matcher.ll.get_error().split()).removesuffix(" <non-verbose/>")
                row.matcher.failure = (
                    f"after {len(row.token_ids)} tokens of the answer the grammar lets none follow "
                    f"({said[:200]}): correct it"
                )
            elif not has_any:
                row.matcher.failure = "the grammar and allowed_token_ids leave no token"
            else:
                mask[row.number] = left

    def _allowed(self, rows: Sequence[MaskRow], num_words: int) -> np.ndarray:
        """u32[rows, words]: what each grammar allows."""
        allowed = np.empty((len(rows), num_words), np.uint32)
        followed: list[tuple[LLMatcher, int]] = []
        places: list[int] = []
        for i, row in enumerate(rows):
            known, place = self._known(row)
            if known is None:
                followed.append((row.matcher.ll, i))
                places.append(place)
            else:
                allowed[i] = known
        if followed:
            fill_next_token_bitmask_par(self._executor, followed, allowed.view(np.int32))
        for (_, i), place in zip(followed, places, strict=True):
            rows[i].matcher.tell(place, allowed[i].copy())
        for i, row in enumerate(rows):
            if row.goes_on:
                without = allowed[i] & row.matcher.vocabulary.words_without_eos
                if without.any():
                    allowed[i] = without
            if row.also_id is not None:
                allowed[i, row.also_id // 32] |= np.uint32(1 << row.also_id % 32)
        return allowed

    def _known(self, row: MaskRow) -> tuple[np.ndarray | None, int]:
        """A mask that need not be computed, and the place of the answer where it is looked at."""
        matcher = row.matcher
        try:
            closing = matcher.closing_mask(row.token_ids, row.budget)
            if closing is not None:
                return closing, DEAD
            place = matcher.place(row.token_ids)
        except RequestError as error:
            matcher.failure = str(error)
            return None, DEAD
        return matcher.told(place), place
