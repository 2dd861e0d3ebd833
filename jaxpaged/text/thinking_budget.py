"""Reasoning of an answer that no grammar holds, ended after so many tokens."""

from collections.abc import Sequence

from jaxpaged.text.tokenizer import Tokenizer


class ThinkingBudget:
    """Follows one answer until its reasoning has ended. Owned by the engine's thread.

    Args:
        begin, end: the marks of reasoning.
        is_open: the prompt has opened it; else the answer may begin with the mark.
        max_tokens: of the reasoning between the marks; then `end` is forced.
    """

    def __init__(
        self, tokenizer: Tokenizer, begin: str, end: str, *, is_open: bool, max_tokens: int
    ):
        self._tokenizer = tokenizer
        self._begin, self._end = begin.encode(), end.encode()
        self._end_ids = tokenizer.encode(end, add_special_tokens=False)
        self._is_open, self._num_left = is_open, max_tokens
        self._text = b""  # where it is not open yet, all; else what may begin the closing mark
        self._num_forced = 0

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, where the budget is used up."""
        if not self._is_open or self._num_left > 0:
            return None
        return self._end_ids[self._num_forced]

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        """Read new tokens; True once there is no reasoning any more."""
        return any(self._takes(token_id) for token_id in token_ids)

    def _takes(self, token_id: int) -> bool:
        self._num_forced += token_id == self.forced_id
        self._text += self._tokenizer.token_bytes(token_id)
        if not self._is_open:
            return self._reads_opening(self._text.lstrip())
        self._num_left -= 1
        is_closed = self._end in self._text or self._num_forced == len(self._end_ids)
        self._text = self._text[1 - len(self._end) :]
        return is_closed

    def _reads_opening(self, text: bytes) -> bool:
        if self._begin.startswith(text):
            self._is_open = text == self._begin
        elif text.startswith(self._begin):
            self._is_open = True
        else:
            return True
        if self._is_open:
            self._text = b""
        return False
