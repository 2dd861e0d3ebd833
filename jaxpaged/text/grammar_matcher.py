"""Answers followed token by token in their grammars, and the masks of a whole step."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.errors import RequestError
from jaxpaged.text.grammar import CompiledGrammar
from jaxpaged.text.grammars.endings import DEAD, Endings
from jaxpaged.text.grammars.failures import is_too_complex, no_next_token


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
        if self.ll.consume_token(token_id):
            return True
        if is_too_complex(self.ll):
            self.failure = f"the grammar cannot be followed, {no_next_token(self.ll)}"
        return False

    def known(self, token_ids: Sequence[int], budget: int) -> tuple[np.ndarray | None, int]:
        """The tokens that may come next, where they need not be computed, and where the answer is.

        Near its end those after which the answer can still end, before that what an earlier answer
        was allowed at the same place.

        Args:
            token_ids: all that were accepted.
            budget: tokens that may still come, the next one included.

        Returns:
            u32 words as `mask_words` makes them, or None; and the place for `tell`.
        """
        endings = self._endings
        is_near_end = endings is not None and budget <= self._safe_above
        if endings is None or not (is_near_end or endings.come_again):
            return None, DEAD
        place = self._walk(endings, token_ids)
        if is_near_end:
            self._safe_above = endings.worst(place)
        if place == DEAD:
            return None, DEAD
        if is_near_end and not endings.is_safe(place, budget):
            return endings.mask(place, budget), DEAD
        return (endings.told(place), place) if endings.come_again else (None, DEAD)

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
    has_bans: bool = False  # some tokens are banned already


class MaskFiller:
    """Computes the masks of a step's rows, many at once. Owned by the engine's thread."""

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def ban(self, banned: np.ndarray, rows: Sequence[MaskRow]) -> None:
        """Ban in `banned`, u32[seqs, words], what the grammars of `rows` do not allow.

        A row in which nothing is left stays as it was, and its matcher has the reason.
        """
        asked: list[tuple[MaskRow, int]] = []
        for row in rows:
            known, place = None, DEAD
            try:
                known, place = row.matcher.known(row.token_ids, row.budget)
            except RequestError as error:
                row.matcher.failure = str(error)
            if known is None:
                asked.append((row, place))
            else:
                _ban_all_but(known, banned[row.number], row, is_some=True)
        if not asked:
            return
        allowed = np.empty((len(asked), banned.shape[1]), np.uint32)
        followed = [(row.matcher.ll, i) for i, (row, _) in enumerate(asked)]
        fill_next_token_bitmask_par(self._executor, followed, allowed.view(np.int32))
        for (row, place), mask in zip(asked, allowed, strict=True):
            is_some = bool(mask.any())
            if is_some:
                row.matcher.tell(place, mask.copy())
            _ban_all_but(mask, banned[row.number], row, is_some)


def _ban_all_but(allowed: np.ndarray, banned: np.ndarray, row: MaskRow, is_some: bool) -> None:
    """Write a row of bans; `allowed` stays as it is, and has a token if `is_some`."""
    matcher = row.matcher
    if row.goes_on:
        without = allowed & matcher.vocabulary.words_without_eos
        allowed = without if without.any() else allowed
    if row.also_id is not None:
        allowed = allowed.copy()
        allowed[row.also_id // 32] |= np.uint32(1 << row.also_id % 32)
        is_some = True
    if row.has_bans:
        allowed = allowed & ~banned
        is_some = bool(allowed.any())
    if matcher.ll.is_error():
        matcher.failure = (
            f"after {len(row.token_ids)} tokens of the answer the grammar lets none follow, "
            f"{no_next_token(matcher.ll)}: correct it"
        )
    elif not is_some:
        matcher.failure = "the grammar and allowed_token_ids leave no token"
    else:
        np.invert(allowed, out=banned)
