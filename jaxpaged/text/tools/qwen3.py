"""qwen3: `<function=name><parameter=key>value</parameter></function>` of Qwen3-Coder, or hermes.

A value is bare text; what it means is for the tool's schema to say.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from jaxpaged.text.text_reader import Malformed, Steps, TextReader
from jaxpaged.text.tools.calls import Calls, attempt, json_call
from jaxpaged.text.tools.hermes import OPEN, close_tag

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME = 256
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,), "string": (str,),
}  # fmt: skip


def read_qwen3(reader: TextReader, calls: Calls) -> Steps[None]:
    """Content and calls; `<tool_call>` round the function may be missing."""
    while opening := (yield from reader.until((OPEN, FUNCTION), calls.content)):
        reader.mark()
        reading = _function(reader, calls) if opening == FUNCTION else _wrapped(reader, calls)
        if (yield from attempt(reader, calls, reading, opening)):
            yield from close_tag(reader)


def _wrapped(reader: TextReader, calls: Calls) -> Steps[None]:
    yield from reader.skip()
    if (yield from reader.take_if(FUNCTION)):
        yield from _function(reader, calls)
    else:
        yield from json_call(reader, calls)


def _function(reader: TextReader, calls: Calls) -> Steps[None]:
    name = yield from _name(reader)
    calls.name(name)
    properties = _object(_object(calls.tools.get(name)).get("properties"))
    before = "{"
    while True:
        yield from reader.skip()
        if not (yield from reader.take_if(PARAMETER)):
            break
        key = yield from _name(reader)
        before += f"{_quoted(key)}: "
        yield from _value(reader, calls, before, kinds_of(properties.get(key)))
        before = ", "
    if not (yield from reader.take_if(FUNCTION_END)):
        raise Malformed
    calls.arguments("{}" if before == "{" else "}")
    calls.arguments_end()


def _name(reader: TextReader) -> Steps[str]:
    name = ""
    while (character := (yield from reader.take())) != ">":
        name += character
        if len(name) > _MAX_NAME:
            raise Malformed
    return name.strip()


def _value(reader: TextReader, calls: Calls, before: str, kinds: frozenset[str]) -> Steps[None]:
    """A parameter's value: text as it comes, anything else once it is whole."""
    yield from reader.take_if("\n")
    if kinds <= {"string"}:
        calls.arguments(before + '"')
        text = _LineEndHeld(lambda piece: calls.arguments(_quoted(piece)[1:-1]))
        end = yield from reader.until((PARAMETER_END,), text.add)
        if not end:
            raise Malformed
        calls.arguments('"')
        return
    pieces: list[str] = []
    if not (yield from reader.until((PARAMETER_END,), pieces.append)):
        raise Malformed
    calls.arguments(before + typed_value("".join(pieces).removesuffix("\n"), kinds))


class _LineEndHeld:
    """Passes text on but for a line break at its end, which belongs to the format."""

    def __init__(self, sink: Any):
        self._sink, self._held = sink, ""

    def add(self, text: str) -> None:
        text = self._held + text
        words = text.removesuffix("\n")
        self._held = text[len(words) :]
        if words:
            self._sink(words)


def kinds_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names; none where it leaves them open."""
    found = _object(schema)
    kinds: set[str] = set()
    named = found.get("type")
    for kind in cast("list[Any]", named) if isinstance(named, list) else [named]:
        if isinstance(kind, str):
            kinds.add(kind)
    for word in ("anyOf", "oneOf"):
        options = found.get(word)
        for option in cast("list[Any]", options) if isinstance(options, list) else []:
            kinds |= kinds_of(option)
    return frozenset(kinds & _KINDS.keys())


def typed_value(text: str, kinds: frozenset[str]) -> str:
    """A bare value as JSON of one of `kinds`, or as a string where it is none of them."""
    bare = text.strip()
    lowered = bare.lower() if bare.lower() in ("true", "false", "null", "none") else bare
    try:
        value = msgspec.json.decode("null" if lowered == "none" else lowered)
    except (msgspec.DecodeError, RecursionError):
        return _quoted(text)
    allowed = tuple(kind for name in kinds - {"string"} for kind in _KINDS[name])
    is_bool = isinstance(value, bool)
    if not isinstance(value, allowed) or (is_bool and "boolean" not in kinds):
        return _quoted(text)
    return "null" if value is None else lowered


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
