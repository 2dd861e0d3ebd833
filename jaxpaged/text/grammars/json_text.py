"""Pieces of JSON that need no schema: strings, white space, any value, a value given."""

import json
from typing import Any

from jaxpaged.text.grammars.expressions import (
    Call,
    Chars,
    Choice,
    Concat,
    Expression,
    Repeat,
    Text,
    Unit,
    all_but,
    chars,
    choice,
    one_of,
    optional,
    pruned,
    seq,
)
from jaxpaged.text.grammars.numbers import NUMBER

ANY_DEPTH = 8  # objects and arrays one in another, where a schema leaves a value open
INDENT = 24  # most spaces after a line's end
_WHITE = " \t\n\r"
_QUOTE = Text('"')
_UNWRITTEN = chars((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # only escaped
_HEX = chars((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
_UNICODE = choice(
    [
        seq(chars((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)),
            Repeat(_HEX, 3, 3)),
        seq(one_of("dD"), chars((0x30, 0x37)), Repeat(_HEX, 2, 2)),  # no half of a pair
    ]
)  # fmt: skip
PLAIN = all_but(_UNWRITTEN)
CHARACTER = choice(
    [PLAIN, seq(Text("\\"), choice([one_of('"\\/bfnrt'), seq(Text("u"), _UNICODE)]))]
)
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def string(least: int = 0, most: int | None = None) -> Expression:
    """A string of so many characters."""
    return seq(_QUOTE, Repeat(CHARACTER, least, most), _QUOTE)


def string_like(content: Expression) -> Expression:
    """A string whose characters, once read, are in the language of `content`."""
    return seq(_QUOTE, _written(content), _QUOTE)


def key_without(names: list[str]) -> Expression:
    """A member's name that is none of `names`. Escapes are left out: they could spell one."""
    return seq(_QUOTE, _none_of(sorted(set(names)), 0), _QUOTE)


def _none_of(names: list[str], depth: int) -> Expression:
    """Texts that differ from all of `names`, which agree in their first `depth` characters."""
    by_first: dict[str, list[str]] = {}
    for name in names:
        if len(name) > depth:
            by_first.setdefault(name[depth], []).append(name)
    others = all_but(chars(*_UNWRITTEN.ranges, *((ord(c), ord(c)) for c in by_first)))
    options: list[Expression] = [seq(others, Repeat(PLAIN, 0, None))]
    for first, group in by_first.items():
        if ord(first) > 0x1F and first not in '"\\':
            options.append(seq(Text(first), _none_of(group, depth + 1)))
    if all(len(name) != depth for name in names):
        options.append(Text(""))
    return choice(options)


def _written(content: Expression) -> Expression:
    """The same text inside a JSON string."""
    match content:
        case Text(value):
            return Text("".join(_SHORT.get(c) or (c if c > "\x1f" else _code(c)) for c in value))
        case Chars(ranges):
            return _written_chars(ranges)
        case Concat(parts):
            return Concat(tuple(map(_written, parts)))
        case Choice(options):
            return Choice(tuple(map(_written, options)))
        case Repeat(part, least, most):
            return Repeat(_written(part), least, most)
        case Call() | Unit():
            raise AssertionError("a pattern calls no rules and holds no values")


def _written_chars(ranges: tuple[tuple[int, int], ...]) -> Expression:
    escaped = [c for low, high in _UNWRITTEN.ranges for c in range(low, high + 1)]
    wanted = [c for c in escaped if any(low <= c <= high for low, high in ranges)]
    if not wanted:
        return Chars(ranges)
    outside = chars(*_UNWRITTEN.ranges, *all_but(Chars(ranges)).ranges)
    plain = all_but(outside)
    codes = [Text(_SHORT.get(chr(c)) or _code(chr(c))) for c in wanted]
    return choice([*([plain] if plain.ranges else []), *codes])


def _code(character: str) -> str:
    return f"\\u{ord(character):04x}"


class JsonStyle:
    """Where white space may stand, and how much.

    Args:
        space: what may stand after a comma, a colon and an opening bracket, and before a closing
            one; None for nothing.
    """

    def __init__(self, space: Expression | None):
        self.gap: Expression = Text("") if space is None else optional(space)

    def mark(self, text: str) -> Expression:
        """A comma, colon or opening bracket and what may follow it."""
        return seq(Text(text), self.gap)

    def close(self, text: str) -> Expression:
        return seq(self.gap, Text(text))

    def listed(self, opening: str, items: Expression, closing: str) -> Expression:
        return seq(self.mark(opening), Unit(items), self.close(closing))

    def repeated(self, item: Expression, least: int, most: int | None) -> Expression:
        """`item` separated by commas, at least once."""
        more = None if most is None else most - 1
        rest = Repeat(seq(self.mark(","), item), max(least - 1, 0), more)
        return item if more == 0 else seq(item, rest)

    def value(self, given: Any) -> Expression:
        """Exactly this value."""
        if isinstance(given, dict):
            members = [
                seq(Text(literal(name)), self.mark(":"), Unit(self.value(one)))
                for name, one in given.items()
            ]
            return self._given("{", members, "}")
        if isinstance(given, list):
            return self._given("[", [Unit(self.value(one)) for one in given], "]")
        return Text(literal(given))

    def _given(self, opening: str, parts: list[Expression], closing: str) -> Expression:
        if not parts:
            return Text(opening + closing)
        rest = [seq(self.mark(","), part) for part in parts[1:]]
        return self.listed(opening, seq(parts[0], *rest), closing)

    def any_value(self, rules: dict[str, Expression], depth: int = ANY_DEPTH) -> Expression:
        """Any JSON value, `depth` brackets deep at most; its rules are added to `rules`."""
        name = f"any{depth}"
        if depth == 0:
            simple = [Text("true"), Text("false"), Text("null"), string(), NUMBER]
            rules.setdefault(name, choice(simple))
        elif name not in rules:
            inner = self.any_value(rules, depth - 1)
            rules[name] = choice(
                [
                    Call("any0"),
                    Text("{}"),
                    Text("[]"),
                    self.listed(
                        "{", self.repeated(seq(string(), self.mark(":"), inner), 1, None), "}"
                    ),
                    self.listed("[", self.repeated(inner, 1, None), "]"),
                ]
            )
        return Call(name)


def literal(value: Any) -> str:
    """`value` as JSON without white space."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def white_space(pattern: Expression) -> Expression | None:
    """What JSON takes for white space in the language of `pattern`; None where there is nothing.

    `\\s` matches form feeds too, which JSON refuses.
    """
    return pruned(pattern, _white)


def _white(leaf: Text | Chars | Call) -> Expression | None:
    match leaf:
        case Text(value):
            return leaf if not value.strip(_WHITE) else None
        case Chars(ranges):
            kept = one_of("".join(c for c in _WHITE if any(a <= ord(c) <= b for a, b in ranges)))
            return kept if kept.ranges else None
        case Call():
            raise AssertionError("a pattern calls no rules")


def bounded_space() -> Expression:
    """One space, or a new line with its indentation."""
    return choice([Text(" "), seq(Text("\n"), Repeat(Text(" "), 0, INDENT))])
