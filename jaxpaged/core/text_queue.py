"""Who is embedded when: texts that wait, those in the background behind all others."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Text:
    """One text of a call, in tokens."""

    call_id: int
    index: int
    token_ids: Sequence[int]
    second_from: int  # where the second text of a pair begins; at the end where there is none
    is_background: bool = False
    turn: int = 0


class TextQueue:
    """Texts that wait. A step takes from the background only while nothing else waits."""

    def __init__(self) -> None:
        self._live, self._behind = _Line(), _Line()

    def __len__(self) -> int:
        return len(self._live) + len(self._behind)

    @property
    def num_live(self) -> int:
        """Texts that do not wait in the background."""
        return len(self._live)

    def add(self, texts: Iterable[Text]) -> None:
        """Queue the texts of one call."""
        for turn, text in enumerate(sorted(texts, key=lambda text: -len(text.token_ids))):
            line = self._line(text)
            text.turn = line.turn + turn
            line.push(text)

    def drop(self, call_id: int) -> None:
        """Forget what waits of a call."""
        self._live.drop(call_id)
        self._behind.drop(call_id)

    def take(self, most: int) -> list[Text]:
        """The next `most` texts, none of them in the background if one is not."""
        return (self._live if len(self._live) else self._behind).take(most)

    def put_back(self, texts: Iterable[Text]) -> None:
        """Have texts wait again for whom a step had no room."""
        for text in texts:
            self._line(text).push(text)

    def _line(self, text: Text) -> "_Line":
        return self._behind if text.is_background else self._live


class _Line:
    """The n-th text of a call waits for n texts of every other one, not for all.

    A call's longest texts come first, so that texts of like length meet in a step.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Text]] = []
        self._numbers, self.turn = itertools.count(), 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, text: Text) -> None:
        heapq.heappush(self._heap, (text.turn, next(self._numbers), text))

    def drop(self, call_id: int) -> None:
        self._heap = [entry for entry in self._heap if entry[2].call_id != call_id]
        heapq.heapify(self._heap)

    def take(self, most: int) -> list[Text]:
        texts = [heapq.heappop(self._heap)[2] for _ in range(min(most, len(self._heap)))]
        if texts:
            self.turn = texts[0].turn
        return texts
