"""What a language is made of: a grammar is one expression and the rules that it calls by name."""

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class Unit:
    """`part`, of which no text is the beginning of another, as of JSON values (`lark`)."""

    part: "Expression"


type Expression = Text | Chars | Concat | Choice | Repeat | Call | Unit


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


def without_dead_ends(grammar: Grammar) -> Grammar | None:
    """The same texts, without ways into empty choices and rules that call each other for ever.

    None where there are only such ways.
    """
    ending: set[str] = set()
    while True:
        size = len(ending)
        for name, body in grammar.rules.items():  # most come after those that they call
            if name not in ending and _ending(body, ending) is not None:
                ending.add(name)
        if len(ending) == size:
            break
    root = _ending(grammar.root, ending)
    if root is None:
        return None
    kept = {name: _ending(body, ending) for name, body in grammar.rules.items()}
    return Grammar(root, {name: body for name, body in kept.items() if body is not None})


def _ending(expression: Expression, rules: set[str]) -> Expression | None:
    """`expression` as far as it calls none but `rules`; None where nothing is left."""
    return pruned(
        expression, lambda leaf: leaf if not isinstance(leaf, Call) or leaf.rule in rules else None
    )


def pruned(
    expression: Expression, keep: Callable[[Text | Chars | Call], Expression | None]
) -> Expression | None:
    """`expression` with what `keep` leaves of its leaves; None where no text is left."""
    match expression:
        case Unit(part):
            found = pruned(part, keep)
            return Unit(found) if found else None
        case Repeat(part, least, most):
            found = pruned(part, keep)
            return Repeat(found, least, most) if found else None if least else Text("")
        case Concat(parts):
            every = [found for part in parts if (found := pruned(part, keep)) is not None]
            return Concat(tuple(every)) if len(every) == len(parts) else None
        case Choice(options):
            some = [found for one in options if (found := pruned(one, keep)) is not None]
            return choice(some) if some else None
        case leaf:
            return keep(leaf)
