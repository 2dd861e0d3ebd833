"""Reading text that arrives in pieces, so that the pieces never change what is read.

A reading is a generator that yields wherever it needs more text and decides nothing before it has
seen enough, or the end. So it is written as if the whole text were there.
"""

from collections.abc import Callable, Generator, Sequence

import msgspec

from jaxpaged.text.json_scanner import JsonScanner

type Steps[T] = Generator[None, None, T]
type Sink = Callable[[str], object]

SPACE = " \t\r\n"


class Malformed(Exception):
    """The text is not what was to be read here."""


class TextReader:
    """A place in a text of which more may come. `mark` keeps what follows, to `rewind` there."""

    __slots__ = ("_is_ended", "_mark", "_place", "_text")

    def __init__(self) -> None:
        self._text, self._place = "", 0
        self._mark: int | None = None
        self._is_ended = False

    def push(self, text: str) -> None:
        start = self._place if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._place -= start
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """No more will come."""
        self._is_ended = True

    @property
    def is_at_end(self) -> bool:
        """Nothing is left, and no more will come."""
        return self._is_ended and self._place == len(self._text)

    def mark(self) -> None:
        self._mark = self._place

    def unmark(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Go back to the mark, and take it away."""
        assert self._mark is not None
        self._place, self._mark = self._mark, None

    def peek(self) -> Steps[str]:
        """The next character, or nothing at the end."""
        while self._place == len(self._text) and not self._is_ended:
            yield
        return self._text[self._place : self._place + 1]

    def take(self) -> Steps[str]:
        """`peek`, and go past it.

        Raises:
            Malformed: the text has ended.
        """
        character = yield from self.peek()
        if not character:
            raise Malformed
        self._place += 1
        return character

    def skip(self, characters: str = SPACE) -> Steps[None]:
        """Go past any of these characters."""
        while True:
            while self._place < len(self._text):
                if self._text[self._place] not in characters:
                    return
                self._place += 1
            if self._is_ended:
                return
            yield

    def take_if(self, word: str) -> Steps[bool]:
        """Go past `word` if it comes next."""
        while True:
            seen = self._text[self._place : self._place + len(word)]
            if seen == word:
                self._place += len(word)
                return True
            if self._is_ended or not word.startswith(seen):
                return False
            yield

    def expect(self, word: str) -> Steps[None]:
        """Go past space and `word`.

        Raises:
            Malformed: something else comes.
        """
        yield from self.skip()
        if not (yield from self.take_if(word)):
            raise Malformed

    def until(self, marks: Sequence[str], sink: Sink) -> Steps[str]:
        """Give text to `sink` up to one of `marks`, go past it and return it; "" at the end."""
        while True:
            found = [(i, mark) for mark in marks if (i := self._text.find(mark, self._place)) >= 0]
            if found:
                end, mark = min(found)
                sink(self._text[self._place : end])
                self._place = end + len(mark)
                return mark
            end = len(self._text) - (0 if self._is_ended else self._num_pending(marks))
            sink(self._text[self._place : end])
            self._place = end
            if self._is_ended:
                return ""
            yield

    def json(self, scanner: JsonScanner, sink: Sink) -> Steps[None]:
        """Give one JSON value to `sink`, as far as it is one.

        Raises:
            Malformed: the text departs from JSON, or ends; what came before has been given.
        """
        yield from self.skip()
        while True:
            text, self._place = scanner.take(self._text, self._place)
            if text:
                sink(text)
            if scanner.is_complete:
                return
            if scanner.is_broken or self._is_ended:
                raise Malformed
            yield

    def string(self) -> Steps[str]:
        """A JSON string's value.

        Raises:
            Malformed: no string comes.
        """
        yield from self.skip()
        if (yield from self.peek()) != '"':
            raise Malformed
        pieces: list[str] = []
        yield from self.json(JsonScanner(), pieces.append)
        return decoded_string("".join(pieces))

    def _num_pending(self, marks: Sequence[str]) -> int:
        """How many of the last characters may be the beginning of a mark."""
        most = min(len(self._text) - self._place, max(map(len, marks), default=1) - 1)
        for count in range(most, 0, -1):
            tail = self._text[-count:]
            if any(mark.startswith(tail) for mark in marks):
                return count
        return 0


def decoded_string(text: str) -> str:
    """What a JSON string says.

    Raises:
        Malformed: half of a surrogate pair, which is no text.
    """
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        raise Malformed from None
