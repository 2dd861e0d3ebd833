"""What a language is made of, and the same written for llguidance.

A grammar is one expression and the rules that it calls by name. A part that calls no rule is a
regular expression of its own: one lexeme for llguidance. Lexemes must not run into each other: the
longest match must be the right one. JSON is written so that it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class Text:
    """Exactly these characters."""

    value: str


@dataclass(frozen=True)
class Chars:
    """One character of these code points: ranges, ascending, both ends included."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Concat:
    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Choice:
    """One of several; none at all is the empty language."""

    options: tuple["Expression", ...]


@dataclass(frozen=True)
class Repeat:
    """`part`, `least` to `most` times; without `most` as often as wanted."""

    part: "Expression"
    least: int
    most: int | None


@dataclass(frozen=True)
class Call:
    """What the rule of this name says."""

    rule: str


type Expression = Text | Chars | Concat | Choice | Repeat | Call


@dataclass(frozen=True)
class Grammar:
    root: Expression
    rules: Mapping[str, Expression] = field(default_factory=dict)


def seq(*parts: Expression) -> Expression:
    return parts[0] if len(parts) == 1 else Concat(parts)


def choice(options: Sequence[Expression]) -> Expression:
    return options[0] if len(options) == 1 else Choice(tuple(options))


def optional(part: Expression) -> Expression:
    return Repeat(part, 0, 1)


def chars(*ranges: tuple[int, int]) -> Chars:
    """A set of characters, from ranges in any order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return Chars(tuple(merged))


def one_of(characters: str) -> Chars:
    return chars(*((ord(c), ord(c)) for c in characters))


def all_but(excluded: Chars) -> Chars:
    """Every character outside `excluded`; halves of surrogate pairs are no characters."""
    ranges: list[tuple[int, int]] = []
    start = 0
    for low, high in chars(*excluded.ranges, SURROGATES).ranges:
        if start < low:
            ranges.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        ranges.append((start, MAX_CODE_POINT))
    return Chars(tuple(ranges))


def calls_rules(expression: Expression) -> bool:
    match expression:
        case Call():
            return True
        case Concat(parts) | Choice(parts):
            return any(map(calls_rules, parts))
        case Repeat(part):
            return calls_rules(part)
        case _:
            return False


def to_regex(expression: Expression) -> str:
    """A regular expression in the dialect of Rust's regex crate, matching the whole."""
    match expression:
        case Text(value):
            return "".join(map(_escaped, value))
        case Chars(ranges):
            return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges) + "]"
        case Concat(parts):
            return "".join(map(to_regex, parts))
        case Choice(options):
            return "(?:" + "|".join(map(to_regex, options)) + ")"
        case Repeat(part, least, most):
            return f"(?:{to_regex(part)}){_counts(least, most)}"
        case Call(rule):
            raise ValueError(f"rule {rule} inside a regular expression")


def to_lark(grammar: Grammar) -> str:
    """The whole grammar as llguidance's Lark."""
    rules = {"start": grammar.root, **grammar.rules}
    return "\n".join(f"{name}: {_lark(body)}" for name, body in rules.items())


def _lark(expression: Expression) -> str:
    if not calls_rules(expression):
        return f"/{to_regex(expression) or '(?:)'}/"
    match expression:
        case Call(rule):
            return rule
        case Concat(parts):
            return " ".join(_lark_run(parts))
        case Choice(options):
            return "( " + " | ".join(map(_lark, options)) + " )"
        case Repeat(part, least, most):
            return f"( {_lark(part)} ){_counts(least, most)}"
        case _:
            raise AssertionError("unreachable")


def _lark_run(parts: Sequence[Expression]) -> list[str]:
    """Neighbours that call no rule become one lexeme."""
    written: list[str] = []
    regular: list[Expression] = []
    for part in _flat(parts):
        if not calls_rules(part):
            regular.append(part)
            continue
        if regular:
            written.append(_lark(Concat(tuple(regular))))
            regular = []
        written.append(_lark(part))
    if regular:
        written.append(_lark(Concat(tuple(regular))))
    return written


def _flat(parts: Sequence[Expression]) -> list[Expression]:
    flat: list[Expression] = []
    for part in parts:
        flat += _flat(part.parts) if isinstance(part, Concat) else [part]
    return [part for part in flat if part != Text("")]


def _counts(least: int, most: int | None) -> str:
    marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return marks.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def _escaped(character: str) -> str:
    plain = character.isascii() and (character.isalnum() or character in ' ":,_')
    return character if plain else f"\\x{{{ord(character):x}}}"
