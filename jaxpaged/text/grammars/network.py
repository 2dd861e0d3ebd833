"""A grammar as states and arrows over bytes, and the tokens that each state is from its end.

Every rule is a piece of its own with one start and one end; a call goes through another piece and
comes back, so that recursion needs no more than a stack of states to come back to.
"""

import time
from collections.abc import Set

from jaxpaged.errors import RequestError
from jaxpaged.text.grammars.expressions import (
    Call,
    Chars,
    Choice,
    Concat,
    Expression,
    Grammar,
    Repeat,
    Text,
    Unit,
)
from jaxpaged.text.grammars.refusal import refusal
from jaxpaged.text.grammars.utf8 import byte_ranges

MAX_STATES = 30_000
MAX_CALL_DEPTH = 300
SHARED_ABOVE = 4  # a part that is repeated more often becomes a piece of its own


class Network:
    """States by number; `starts` and `ends` of the pieces, 0 being the whole.

    Args:
        deadline: seconds, monotonic; building stops there with a RequestError.

    Raises:
        RequestError: too large, too slow, or a rule that calls itself without a byte between.
    """

    def __init__(self, grammar: Grammar, *, param: str, deadline: float):
        self._param, self._deadline = param, deadline
        self.empty: list[list[int]] = []  # arrows that take no byte
        self.arrows: list[list[tuple[int, int, int]]] = []  # first and last byte, where to
        self.calls: list[list[tuple[int, int]]] = []  # piece, and where it comes back to
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}  # the piece that ends in a state
        self._pieces: dict[str | Expression, int] = {}
        self._rules = grammar.rules
        self._waiting: list[tuple[int, Expression]] = []
        self._new_piece(grammar.root)
        while self._waiting:
            piece, body = self._waiting.pop()
            end = self._add(body, self.starts[piece])
            self.ends[self._leave(end)] = piece
        self._check_calls()

    def _new_piece(self, body: Expression) -> int:
        piece = len(self.starts)
        self.starts.append(self._state())
        self._waiting.append((piece, body))
        return piece

    def _piece(self, key: str | Expression, body: Expression) -> int:
        if key not in self._pieces:
            self._pieces[key] = self._new_piece(body)
        return self._pieces[key]

    def _state(self) -> int:
        number = len(self.empty)
        if number >= MAX_STATES:
            raise self._too_large()
        if number % 256 == 0:
            self.check_time()
        self.empty.append([])
        self.arrows.append([])
        self.calls.append([])
        return number

    def _too_large(self) -> RequestError:
        return refusal(
            f"{self._param} is too large: it needs over {MAX_STATES} states; bound counts and "
            "lengths lower"
        )

    def check_time(self) -> None:
        """Raise where the deadline has passed."""
        if time.monotonic() > self._deadline:
            raise refusal(f"{self._param} takes too long to compile: make it smaller")

    def _leave(self, state: int) -> int:
        """A fresh state behind `state`."""
        after = self._state()
        self.empty[state].append(after)
        return after

    def _add(self, part: Expression, start: int) -> int:
        """Draw `part` from `start` on; the state where it ends."""
        match part:
            case Text(value):
                return self._add_text(value, start)
            case Chars(ranges):
                return self._add_chars(ranges, start)
            case Concat(parts):
                for one in parts:
                    start = self._add(one, start)
                return start
            case Choice(options):
                return self._add_choice(options, start)
            case Repeat():
                return self._add_repeat(part, start)
            case Unit(inner):
                return self._add(inner, start)
            case Call(rule):
                end = self._state()
                self.calls[start].append((self._piece(rule, self._rules[rule]), end))
                return end

    def _add_text(self, value: str, start: int) -> int:
        for byte in value.encode():
            after = self._state()
            self.arrows[start].append((byte, byte, after))
            start = after
        return start

    def _add_choice(self, options: tuple[Expression, ...], start: int) -> int:
        end, texts = self._state(), set[str]()
        for option in options:
            text = _text_of(option)
            if text is not None:
                texts.add(text)
            else:
                self.empty[self._add(option, self._leave(start))].append(end)
        if texts:
            self._add_texts(texts, self._leave(start), end)
        return end

    def _add_texts(self, texts: Set[str], start: int, end: int) -> None:
        """Draw texts of which an answer is one; what they begin with alike is shared."""
        after: dict[tuple[int, int], int] = {}
        for text in sorted(texts):
            state = start
            for byte in text.encode():
                if (state, byte) not in after:
                    after[state, byte] = self._state()
                    self.arrows[state].append((byte, byte, after[state, byte]))
                state = after[state, byte]
            self.empty[state].append(end)

    def _add_chars(self, ranges: tuple[tuple[int, int], ...], start: int) -> int:
        end = self._state()
        inner: dict[tuple[int, tuple[int, int]], int] = {}  # paths with one beginning share it
        for path in byte_ranges(ranges):
            state = start
            for step in path[:-1]:
                if (state, step) not in inner:
                    inner[state, step] = self._state()
                    self.arrows[state].append((*step, inner[state, step]))
                state = inner[state, step]
            self.arrows[state].append((*path[-1], end))
        return end

    def _add_repeat(self, repeat: Repeat, start: int) -> int:
        part, least, most = repeat.part, repeat.least, repeat.most
        if max(least, most or 0) > MAX_STATES:
            raise self._too_large()
        if max(least, most or 0) > SHARED_ABOVE:
            piece = self._piece(part, part)

            def once(state: int) -> int:
                end = self._state()
                self.calls[state].append((piece, end))
                return end
        else:

            def once(state: int) -> int:
                return self._add(part, state)

        for _ in range(least):
            start = once(start)
        if most is None:
            loop = self._leave(start)
            self.empty[once(loop)].append(loop)
            return self._leave(loop)
        if most == least:
            return start
        end = self._state()
        for _ in range(most - least):
            self.empty[start].append(end)
            start = once(self._leave(start))
        self.empty[start].append(end)
        return end

    def _check_calls(self) -> None:
        """A piece must not come to itself again before a byte was taken: it would never return."""
        self._nullable = self._nullable_pieces()
        self.call_depth = [0] * len(self.starts)  # calls one in another, before a byte
        for piece in range(len(self.starts)):
            self._look(piece, [])

    def _look(self, piece: int, callers: list[int]) -> int:
        if piece in callers:
            raise refusal(f"{self._param} refers to itself without anything between")
        if len(callers) > MAX_CALL_DEPTH:
            raise refusal(f"{self._param} is nested too deep")
        if not self.call_depth[piece]:
            seen, waiting, deepest = {self.starts[piece]}, [self.starts[piece]], 0
            while waiting:
                state = waiting.pop()
                after = list(self.empty[state])
                for called, back in self.calls[state]:
                    deepest = max(deepest, self._look(called, [*callers, piece]))
                    after += [back] * (called in self._nullable)
                new = [s for s in after if s not in seen]
                seen.update(new)
                waiting += new
            self.call_depth[piece] = deepest + 1
        return self.call_depth[piece]

    def _nullable_pieces(self) -> set[int]:
        """Pieces that match nothing at all, found until there are no more."""
        nullable: set[int] = set()
        while True:
            found = {
                p for p, start in enumerate(self.starts) if self._ends_at_once(start, nullable)
            }
            if found == nullable:
                return nullable
            nullable = found

    def _ends_at_once(self, start: int, nullable: set[int]) -> bool:
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            if state in self.ends:
                return True
            after = [*self.empty[state], *(b for c, b in self.calls[state] if c in nullable)]
            new = [s for s in after if s not in seen]
            seen.update(new)
            waiting += new
        return False


def _text_of(expression: Expression) -> str | None:
    """The one text that fits; None where it is not known, or there are others."""
    match expression:
        case Text(value):
            return value
        case Unit(part):
            return _text_of(part)
        case Concat(parts):
            texts = [_text_of(part) for part in parts]
            known = [text for text in texts if text is not None]
            return "".join(known) if len(known) == len(texts) else None
        case _:
            return None
