"""Checks JSON while it arrives: whatever it passes on is the beginning of some JSON value."""

import re
from collections.abc import Callable

MAX_DEPTH = 128
MAX_DIGITS = 400  # of a number

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # inside a string
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_NUMBER_BEGUN = re.compile(r"-?((0|[1-9]\d*)(\.(\d+([eE][+-]?\d*)?)?|[eE][+-]?\d*)?)?", re.ASCII)
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_SPACE = " \t\r\n"
_HEX = frozenset("0123456789abcdefABCDEF")

type _State = Callable[[str], str | None]


class JsonScanner:
    """One JSON value. Line breaks and other control characters inside strings, which models write
    and JSON forbids, are escaped on the way.

    A state is the method that takes the next character: it returns what to pass on, or None where
    the character belongs to the value no more.
    """

    __slots__ = ("_begun", "_digits", "_stack", "_state", "has_value", "is_broken", "is_complete")

    def __init__(self) -> None:
        self._state: _State = self._value
        self._stack: list[str] = []  # the closing brackets that are due
        self._begun = ""  # of a number; what is left of a literal
        self._digits = 0  # hex digits that a \u still needs
        self.has_value = False  # an element or member's value has begun
        self.is_complete = False
        self.is_broken = False

    def take(self, text: str, place: int = 0) -> tuple[str, int]:
        """Read on from `place`; returns what belongs to the value, and where reading stopped."""
        passed: list[str] = []
        while place < len(text) and not self.is_complete:
            if self._state == self._in_string:
                run = _PLAIN.match(text, place)
                if run is not None:
                    passed.append(run[0])
                    place = run.end()
                    continue
            written = self._state(text[place])
            if written is None:
                break
            passed.append(written)
            place += 1
        return "".join(passed), place

    def _break(self) -> None:
        self.is_broken = True

    def _value(self, character: str) -> str | None:
        if character in _SPACE:
            return character
        if character in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._break()
            self.has_value = self.has_value or bool(self._stack)
            self._stack.append("}" if character == "{" else "]")
            self._state = self._first_key if character == "{" else self._first_value
            return character
        if character == '"':
            self._state = self._in_string
        elif character in _LITERALS:
            self._begun, self._state = _LITERALS[character][1:], self._in_literal
        elif _NUMBER_BEGUN.fullmatch(character):
            self._begun, self._state = character, self._in_number
        else:
            return self._break()
        self.has_value = self.has_value or bool(self._stack)
        return character

    def _first_value(self, character: str) -> str | None:
        if character == "]":
            return self._close(character)
        return self._value(character)

    def _first_key(self, character: str) -> str | None:
        if character == "}":
            return self._close(character)
        return self._key(character)

    def _key(self, character: str) -> str | None:
        if character in _SPACE:
            return character
        if character != '"':
            return self._break()
        self._stack.append(":")
        self._state = self._in_string
        return character

    def _colon(self, character: str) -> str | None:
        if character in _SPACE:
            return character
        if character != ":":
            return self._break()
        self._state = self._value
        return character

    def _after(self, character: str) -> str | None:
        if character in _SPACE:
            return character
        if character == ",":
            self._state = self._key if self._stack[-1] == "}" else self._value
            return character
        return self._close(character) if character == self._stack[-1] else self._break()

    def _close(self, character: str) -> str:
        self._stack.pop()
        self._end_value()
        return character

    def _end_value(self) -> None:
        self.is_complete = not self._stack
        self._state = self._after

    def _in_string(self, character: str) -> str | None:
        if character == "\\":
            self._state = self._escape
        elif character == '"':
            if self._stack and self._stack[-1] == ":":
                self._stack.pop()
                self._state = self._colon
            else:
                self._end_value()
        else:
            return f"\\u{ord(character):04x}"
        return character

    def _escape(self, character: str) -> str | None:
        if character == "u":
            self._digits, self._state = 4, self._in_escape
        elif character in '"\\/bfnrt':
            self._state = self._in_string
        else:
            return self._break()
        return character

    def _in_escape(self, character: str) -> str | None:
        if character not in _HEX:
            return self._break()
        self._digits -= 1
        if not self._digits:
            self._state = self._in_string
        return character

    def _in_literal(self, character: str) -> str | None:
        if character != self._begun[0]:
            return self._break()
        self._begun = self._begun[1:]
        if not self._begun:
            self._end_value()
        return character

    def _in_number(self, character: str) -> str | None:
        if len(self._begun) < MAX_DIGITS and _NUMBER_BEGUN.fullmatch(self._begun + character):
            self._begun += character
            return character
        if not _NUMBER.fullmatch(self._begun):
            return self._break()
        self._end_value()
        return None if self.is_complete else self._after(character)
