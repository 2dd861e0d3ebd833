"""A grammar written in Lark for llguidance.

Its lexer goes on as long as any of the lexemes that may come could still match, and never comes
back. So where several may come, none may end inside another's text. A value or what stands between
brackets (`Unit`) is one lexeme where it calls no rule; around it lexemes end with it: `{`, `"a":`,
the value, `,"b":`, the value, `}`. Where a bracket may begin several values and one of them calls
rules, all of them are cut so, down to the innermost.
"""

from collections.abc import Sequence
from types import UnionType

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

_BRACKETS = "{["


def to_lark(grammar: Grammar) -> str:
    """The whole grammar; its first rule is `start`."""
    return _Writer(grammar).text()


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
        case Unit(part):
            return to_regex(part)
        case Call(rule):
            raise ValueError(f"rule {rule} inside a regular expression")


class _Writer:
    """`is_cut` below: units are cut into those that they hold, whether they call rules or not."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self._bodies: dict[str, str] = {}
        self._waiting: list[tuple[str, bool]] = []  # rules that are called: name, and is_cut
        self._openings: dict[str, frozenset[str]] = {}  # by rule

    def text(self) -> str:
        self._bodies["start"] = self._write(self._grammar.root, is_cut=False)
        while self._waiting:
            rule, is_cut = self._waiting.pop()
            self._bodies[_name(rule, is_cut)] = self._write(self._grammar.rules[rule], is_cut)
        return "\n".join(f"{name}: {body}" for name, body in self._bodies.items())

    def _write(self, expression: Expression, is_cut: bool) -> str:
        if not _holds(expression, Call | Unit):
            return _lexeme(expression)
        match expression:
            case Call(rule):
                return self._call(rule, is_cut)
            case Unit(part):
                is_one = not _holds(part, Call | Unit if is_cut else Call)
                return _lexeme(part) if is_one else self._write(part, is_cut)
            case Concat(parts):
                return " ".join(self._run(parts, is_cut))
            case Choice(options):
                cut = self._competing(options)
                written = [self._write(one, is_cut or one in cut) for one in options]
                return "( " + " | ".join(written) + " )"
            case Repeat(part, least, most):
                return f"( {self._write(part, is_cut)} ){_counts(least, most)}"
            case _:
                raise AssertionError("unreachable")

    def _call(self, rule: str, is_cut: bool) -> str:
        name = _name(rule, is_cut)
        if name not in self._bodies:
            self._bodies[name] = ""  # it is being made
            self._waiting.append((rule, is_cut))
        return name

    def _run(self, parts: Sequence[Expression], is_cut: bool) -> list[str]:
        """Neighbours between units become one lexeme."""
        written: list[str] = []
        regular: list[Expression] = []
        for part in _flat(parts):
            if not _holds(part, Call | Unit):
                regular.append(part)
                continue
            if regular:
                written.append(_lexeme(Concat(tuple(regular))))
                regular = []
            written.append(self._write(part, is_cut))
        if regular:
            written.append(_lexeme(Concat(tuple(regular))))
        return written

    def _competing(self, options: Sequence[Expression]) -> list[Expression]:
        """Those that begin with the same bracket as others, if one of these calls a rule."""
        found: list[Expression] = []
        for bracket in _BRACKETS:
            alike = [one for one in options if bracket in self._opening(one)]
            if len(alike) > 1 and any(_holds(one, Call) for one in alike):
                found += alike
        return found

    def _opening(self, expression: Expression) -> frozenset[str]:
        """Brackets that a value may begin with; an empty pair is told apart by its end."""
        match expression:
            case Text(value):
                return frozenset(value[:1] if value not in ("{}", "[]") else "") & {*_BRACKETS}
            case Concat(parts):
                return self._opening(parts[0]) if parts else frozenset()
            case Choice(options):
                return frozenset().union(*map(self._opening, options))
            case Repeat(part) | Unit(part):
                return self._opening(part)
            case Call(rule):
                if rule not in self._openings:
                    self._openings[rule] = frozenset()  # it is being looked at
                    self._openings[rule] = self._opening(self._grammar.rules[rule])
                return self._openings[rule]
            case _:
                return frozenset()


def _name(rule: str, is_cut: bool) -> str:
    return f"{rule}_cut" if is_cut else rule


def _holds(expression: Expression, kind: type | UnionType) -> bool:
    match expression:
        case Concat(parts) | Choice(parts):
            return any(_holds(part, kind) for part in parts)
        case Repeat(part):
            return _holds(part, kind)
        case Unit(part):
            return isinstance(expression, kind) or _holds(part, kind)
        case _:
            return isinstance(expression, kind)


def _lexeme(expression: Expression) -> str:
    return f"/{to_regex(expression) or '(?:)'}/"


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
