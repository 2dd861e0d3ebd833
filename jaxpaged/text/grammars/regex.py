"""Regular expressions as expressions: what Python, JavaScript and Rust agree on, no more."""

from jaxpaged.errors import RequestError
from jaxpaged.text.grammars.expressions import (
    MAX_CODE_POINT,
    Chars,
    Expression,
    Repeat,
    Text,
    all_but,
    chars,
    choice,
    one_of,
    seq,
)
from jaxpaged.text.grammars.refusal import refusal

MAX_LENGTH = 20_000  # characters of a pattern
MAX_DEPTH = 100  # of groups
_DIGITS = chars((0x30, 0x39))
_WORD = chars((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = one_of(" \t\n\r\f\v")
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): all_but(members) for name, members in _CLASSES.items()}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
ANY = all_but(one_of("\n"))
ANYTHING = Repeat(all_but(chars()), 0, None)


def parse_regex(pattern: str, *, param: str, is_search: bool = False) -> Expression:
    """The language of `pattern`, which must match the whole text.

    With `is_search` it may match anywhere in it, as JSON Schema wants; `^` and `$` tie it down.

    Raises:
        RequestError: no regular expression, or one with what is no regular language (back
            references, looking around) or not served (flags, word borders).
    """
    if len(pattern) > MAX_LENGTH:
        raise refusal(
            f"{param}: the pattern has {len(pattern)} characters, allowed are {MAX_LENGTH}"
        )
    parser = _Parser(pattern, param, is_search)
    parsed = parser.alternatives(0)
    if parser.place < len(pattern):
        parser.fail("')' has no '('")
    return parsed


class _Parser:
    """Reads from left to right; `place` is the next character."""

    def __init__(self, pattern: str, param: str, is_search: bool):
        self.pattern, self.param, self.is_search = pattern, param, is_search
        self.place = 0

    def fail(self, what: str) -> RequestError:
        raise refusal(
            f"{self.param}: {what} at character {self.place} of the regular expression "
            f"{self.pattern[:80]!r}"
        )

    def peek(self) -> str:
        return self.pattern[self.place] if self.place < len(self.pattern) else ""

    def take(self) -> str:
        character = self.peek()
        if not character:
            self.fail("it ends too early")
        self.place += 1
        return character

    def takes(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.place)
        self.place += len(text) * found
        return found

    def alternatives(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            self.fail(f"groups are nested deeper than {MAX_DEPTH}")
        options = [self.run(depth)]
        while self.takes("|"):
            options.append(self.run(depth))
        return choice(options)

    def run(self, depth: int) -> Expression:
        """One alternative: pieces with their counts, perhaps tied to both ends."""
        is_outer = depth == 0
        begins = is_outer and self.takes("^")
        parts: list[Expression] = []
        ends = False
        while self.peek() not in ("", "|", ")"):
            if self.takes("$"):
                ends = True
                if not is_outer or self.peek() not in ("", "|"):
                    self.fail("'$' is served only at the end")
                break
            parts.append(self.counted(self.piece(depth)))
        if is_outer and self.is_search:
            parts = [*([] if begins else [ANYTHING]), *parts, *([] if ends else [ANYTHING])]
        return seq(*parts) if parts else Text("")

    def piece(self, depth: int) -> Expression:
        character = self.take()
        if character == "(":
            if self.takes("?") and not self.takes(":"):
                if not (self.takes("P<") or self.takes("<")) or self.peek() in ("=", "!"):
                    self.fail("only groups (...), (?:...) and (?<name>...) are served")
                while self.take() != ">":
                    pass
            inner = self.alternatives(depth + 1)
            if not self.takes(")"):
                self.fail("a group has no ')'")
            return inner
        if character == "[":
            return self.members()
        if character == ".":
            return ANY
        if character == "\\":
            return self.escape()
        if character in "*+?{^":
            self.place -= 1
            self.fail(f"{character!r} is not served here")
        return Text(character)

    def counted(self, part: Expression) -> Expression:
        while self.peek() and self.peek() in "*+?{":
            least, most = self.counts()
            self.takes("?")  # lazy or not: the same language
            part = Repeat(part, least, most)
        return part

    def counts(self) -> tuple[int, int | None]:
        mark = self.take()
        if mark != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        least = self.number()
        most: int | None = least
        if self.takes(","):
            most = None if self.peek() == "}" else self.number()
        if not self.takes("}") or (most is not None and most < least):
            self.fail("a count must be {m}, {m,} or {m,n} with m <= n")
        return least, most

    def number(self) -> int:
        start = self.place
        while self.peek().isdecimal() and self.peek().isascii():
            self.place += 1
        if not 0 < self.place - start < 7:
            self.fail("a count needs 1 to 6 digits")
        return int(self.pattern[start : self.place])

    def escape(self) -> Text | Chars:
        character = self.take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS:
            return Text(_CONTROLS[character])
        if character in "xu":
            return Text(self.code_point(character))
        if character.isascii() and character.isalnum():
            self.fail(f"'\\{character}' is not served")
        return Text(character)

    def code_point(self, kind: str) -> str:
        if self.takes("{"):
            digits = ""
            while not self.takes("}"):
                digits += self.take()
        else:
            digits = "".join(self.take() for _ in range(2 if kind == "x" else 4))
        if len(digits) > 6 or not all(c in "0123456789abcdefABCDEF" for c in digits) or not digits:
            self.fail(f"{digits[:10]!r} is no hexadecimal number")
        value = int(digits, 16)
        if value > MAX_CODE_POINT or 0xD800 <= value <= 0xDFFF:
            self.fail(f"U+{value:X} is no character")
        return chr(value)

    def members(self) -> Chars:
        """A class in brackets, after its '['."""
        is_negated = self.takes("^")
        ranges: list[tuple[int, int]] = []
        is_first = True
        while is_first or self.peek() != "]":
            is_first = False
            low = self.member()
            if isinstance(low, Chars):
                ranges += low.ranges
                continue
            high = low
            if self.peek() == "-" and self.pattern[self.place + 1 : self.place + 2] != "]":
                self.place += 1
                member = self.member()
                if isinstance(member, Chars):
                    self.fail("a range ends in a class")
                high = str(member)
            if ord(high) < ord(low):
                self.fail(f"the range {low}-{high} is empty")
            ranges.append((ord(low), ord(high)))
        self.place += 1
        members = chars(*ranges)
        return all_but(members) if is_negated else members

    def member(self) -> str | Chars:
        character = self.take()
        if character == "[" and self.peek() in (":", "["):
            self.fail("classes inside classes are not served")
        if character != "\\":
            return character
        if self.takes("b"):
            return "\b"
        found = self.escape()
        return found if isinstance(found, Chars) else found.value
