"""pythonic: `[get_weather(city="Berlin", days=3)]`. Values are Python literals, read and never run.

A call is told when it is whole: what is no literal shows only at its end.
"""

import json
import re
from typing import Any

from jaxpaged.text.text_reader import Malformed, Steps, TextReader
from jaxpaged.text.tools.calls import Calls, read_list

MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    r"""|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>[A-Za-z]+)|(?P<sign>[\[\](){},:]))\s*""",
    re.DOTALL | re.ASCII,
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_pythonic(reader: TextReader, calls: Calls) -> Steps[None]:
    """A list of calls, or content. Brackets are weak evidence: the name must be a tool's."""
    yield from read_list(reader, calls, _call)


def _call(reader: TextReader, calls: Calls) -> Steps[None]:
    yield from reader.skip()
    name = yield from _text_to(reader, "(")
    if name not in calls.tools:
        raise Malformed
    calls.name(name)
    members, last = list[str](), "("
    while last != ")":
        yield from reader.skip()
        if (yield from reader.take_if(")")):
            break
        key = (yield from _text_to(reader, "=")).strip()
        if not _NAME.fullmatch(key):
            raise Malformed
        text, last = yield from _value(reader)
        value = json.dumps(python_literal(text), ensure_ascii=False, allow_nan=False)
        members.append(f"{json.dumps(key)}: {value}")
    calls.arguments("{" + ", ".join(members) + "}")
    calls.arguments_end()


def _text_to(reader: TextReader, mark: str) -> Steps[str]:
    """A short text up to a mark, which is passed."""
    text = ""
    while (character := (yield from reader.take())) != mark:
        text += character
        if len(text) > 256 or character in "\"'[]{}()":
            raise Malformed
    return text


def _value(reader: TextReader) -> Steps[tuple[str, str]]:
    """The text of a literal, and the comma or bracket after it."""
    pieces, due = list[str](), list[str]()
    while True:
        character = yield from reader.take()
        if not due and character in ",)":
            return "".join(pieces), character
        pieces.append(character)
        if character in "'\"":
            yield from _quote(reader, character, pieces)
        elif character in _CLOSING:
            due.append(_CLOSING[character])
        elif character in ")]}" and (not due or due.pop() != character):
            raise Malformed


def _quote(reader: TextReader, end: str, pieces: list[str]) -> Steps[None]:
    while True:
        character = yield from reader.take()
        pieces.append(character)
        if character == "\\":
            pieces.append((yield from reader.take()))
        elif character == end:
            return


def python_literal(text: str) -> Any:
    """Numbers, strings, True, False, None, lists, tuples and dicts of them.

    Raises:
        Malformed: anything else, or too deep.
    """
    tokens: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or found.lastgroup is None:
            raise Malformed
        tokens.append((found.lastgroup, found[found.lastgroup]))
        place = found.end()
    tokens.append(("end", ""))
    tokens.reverse()
    value = _literal(tokens, MAX_DEPTH)
    if tokens != [("end", "")]:
        raise Malformed
    return value


def _literal(tokens: list[tuple[str, str]], depth: int) -> Any:
    kind, text = tokens.pop()
    if kind == "string":
        value = _unescaped(text[1:-1])
        while tokens[-1][0] == "string":  # "a" "b" is "ab"
            value += _unescaped(tokens.pop()[1][1:-1])
        return value
    if kind == "number":
        return _number(text)
    if kind == "word" and text in _WORDS:
        return _WORDS[text]
    if text in ("[", "(") and depth:
        return _items(tokens, depth - 1, _CLOSING[text])
    if text == "{" and depth:
        return _members(tokens, depth - 1)
    raise Malformed


def _items(tokens: list[tuple[str, str]], depth: int, closing: str) -> list[Any]:
    items: list[Any] = []
    while tokens[-1][1] != closing:
        items.append(_literal(tokens, depth))
        if tokens[-1][1] == ",":
            tokens.pop()
        elif tokens[-1][1] != closing:
            raise Malformed
    tokens.pop()
    return items


def _members(tokens: list[tuple[str, str]], depth: int) -> dict[str, Any]:
    members: dict[str, Any] = {}
    while tokens[-1][1] != "}":
        key = _literal(tokens, depth)
        if not isinstance(key, str) or tokens.pop()[1] != ":":
            raise Malformed
        members[key] = _literal(tokens, depth)
        if tokens[-1][1] == ",":
            tokens.pop()
        elif tokens[-1][1] != "}":
            raise Malformed
    tokens.pop()
    return members


def _number(text: str) -> int | float:
    try:
        value = float(text) if any(sign in text for sign in ".eE") else int(text)
    except ValueError:
        raise Malformed from None  # thousands of digits
    if value in (float("inf"), float("-inf")):
        raise Malformed
    return value


def _unescaped(text: str) -> str:
    def meaning(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "uUx" and len(code) > 1:
            number = int(code[1:], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise Malformed
            return chr(number)
        return _ESCAPED.get(code, code if code in "\\'\"" else "\\" + code)

    return _ESCAPE.sub(meaning, text)
