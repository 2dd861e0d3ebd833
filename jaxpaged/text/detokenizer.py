"""Token ids to text while they arrive: whole characters only, and never a stop string.

Text that may still become a stop string is held back, and so are the bytes of a character that is
not complete. Whatever the pieces, their join is the text of the whole sequence.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from jaxpaged.text.stop_strings import StopStrings
from jaxpaged.text.tokenizer import Tokenizer


class TextParams(Protocol):
    """The fields of `SamplingParams` that decide about text."""

    @property
    def stop(self) -> str | Sequence[str] | None: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def include_stop_str_in_output(self) -> bool: ...


class Detokenizer:
    """The text of one sequence. Owned by whoever follows that sequence; used once.

    A stop string that is complete within the first `min_tokens` tokens does not count.
    """

    __slots__ = (
        "_held",
        "_include_stop",
        "_min_tokens",
        "_partial",
        "_stops",
        "_strips",
        "_table",
        "num_tokens",
    )

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: TextParams):
        self._table = tokenizer.bytes_table(skip_special_tokens=params.skip_special_tokens)
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._partial = b""  # the beginning of a character
        self._held = ""  # whole characters that may begin a stop string
        # a continuation keeps its first space; only a text from nothing has one that was put there
        self._strips = tokenizer.drops_first_space and not prompt_token_ids
        self.num_tokens = 0  # taken so far, the one that completed a stop string included

    def push(
        self, token_ids: Sequence[int], *, silent_last: bool = False
    ) -> tuple[str, str | None]:
        """Take new tokens; give the text that is certain now, and the stop string that was met.

        After a stop string nothing more may be pushed; `num_tokens` tells which token completed it.
        With `silent_last` the last token counts but adds no text: a stop token or EOS.
        """
        if self._stops is not None:
            return self._push_watching(token_ids, silent_last)
        self.num_tokens += len(token_ids)
        shown = token_ids[:-1] if silent_last else token_ids
        table = self._table
        if len(shown) == 1:
            return self._decode(table[shown[0]]), None
        return self._decode(b"".join([table[i] for i in shown])), None

    def flush(self) -> str:
        """The rest at the end of the sequence; an incomplete character becomes U+FFFD."""
        text = self._held + self._partial.decode("utf-8", "replace")
        self._held, self._partial = "", b""
        return text

    def _decode(self, data: bytes) -> str:
        if self._partial:
            data = self._partial + data
        text, used = utf_8_decode(data, "replace", False)
        self._partial = data[used:]
        if self._strips and text:
            self._strips = False
            return text[1:] if text[0] == " " else text
        return text

    def _push_watching(self, token_ids: Sequence[int], silent_last: bool) -> tuple[str, str | None]:
        assert self._stops is not None
        pieces: list[str] = []
        num_shown = len(token_ids) - silent_last
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if place == num_shown:
                break
            text = self._decode(self._table[token_id])
            if not text:
                continue
            counts = self.num_tokens > self._min_tokens
            found = self._stops.advance(text, may_stop=counts)
            self._held += text
            if found is not None:
                end = len(self._held) - found.num_after
                start = end if self._include_stop else end - len(found.stop)
                pieces.append(self._held[:start])
                self._held, self._partial = "", b""
                return "".join(pieces), found.stop
            certain = len(self._held) - self._stops.num_pending
            pieces.append(self._held[:certain])
            self._held = self._held[certain:]
        return "".join(pieces), None
