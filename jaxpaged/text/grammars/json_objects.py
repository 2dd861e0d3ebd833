"""Objects of a JSON schema: their members in order, with commas where they belong."""

from collections.abc import Callable
from typing import Any

from jaxpaged.text.grammars.expressions import (
    Call,
    Expression,
    Repeat,
    Text,
    choice,
    optional,
    seq,
)
from jaxpaged.text.grammars.json_leaves import Refuse, count
from jaxpaged.text.grammars.json_text import JsonStyle, key_without, literal

MAX_RULES = 300

type Members = list[tuple[Expression, bool]]
"""Each with whether it must be there."""
type Free = tuple[Expression, int, int | None]
"""A member of any name, and how many there may be."""


class ObjectSchema:
    """One object schema, its listed members first, then the free ones.

    Args:
        translate: a schema and where it stands, relative to this one, to its expression.
        rules: the grammar's, to which what is needed more than once is added.
        closes: no free members, whatever the schema says.
    """

    def __init__(
        self,
        schema: dict[str, Any],
        style: JsonStyle,
        rules: dict[str, Expression],
        translate: Callable[[Any, str], Expression],
        refuse: Refuse,
        *,
        closes: bool,
    ):
        self.style, self.rules, self.translate, self.refuse = style, rules, translate, refuse
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise refuse("properties must be an object and required a list")
        if not all(isinstance(name, str) for name in required):
            raise refuse("required must be a list of names")
        self.required = set(required)
        self.free = False if closes else schema.get("additionalProperties", not properties)
        unlisted = [name for name in required if name not in properties]
        if unlisted and self.free is False:
            raise refuse(f"required {unlisted[0]!r} is no property")
        self.properties = properties | dict.fromkeys(unlisted, self.free)
        self.least = count(schema, "minProperties", refuse) or 0
        self.most = count(schema, "maxProperties", refuse)

    def expression(self) -> Expression:
        members = [
            (self._member(name, schema), name in self.required)
            for name, schema in self.properties.items()
            if schema is not False or name in self.required
        ]
        free = self._free_members(len(members))
        inner, can_be_empty = self._from_first(members, free)
        if inner is None:
            return Text("{}")
        full = self.style.listed("{", inner, "}")
        return choice([Text("{}"), full]) if can_be_empty else full

    def _member(self, name: str, schema: Any) -> Expression:
        value = self.translate(schema, f"properties/{name}")
        return seq(Text(literal(name)), self.style.mark(":"), value)

    def _free_members(self, num_listed: int) -> Free | None:
        """A free member, and how many there may be."""
        num_required = len(self.required)
        has_free = self.free is not False and self.most != num_listed
        if self.least > num_required + (has_free and not num_listed):
            raise self.refuse("minProperties is over what required asks for")
        if self.most is not None and self.most < num_listed:
            raise self.refuse("maxProperties is under the number of properties")
        if not has_free:
            return None
        value = self.translate(self.free, "additionalProperties")
        member = seq(key_without(list(self.properties)), self.style.mark(":"), value)
        room = None if self.most is None else self.most - num_listed
        return member, max(self.least - num_required, 0), room

    def _from_first(
        self,
        members: Members,
        free: Free | None,
    ) -> tuple[Expression | None, bool]:
        """All that may stand between the brackets, but nothing; and whether nothing may."""
        comma = self.style.mark(",")
        tail: Expression = Text("")
        options: list[Expression] = []
        can_be_empty = True
        if free is not None:
            member, least, room = free
            tail = Repeat(seq(comma, member), 0, room)
            options.append(self.style.repeated(member, max(least, 1), room))
            can_be_empty = not least
        num_leading = next((i for i, (_, must) in enumerate(members) if must), len(members))
        for number in range(len(members) - 1, -1, -1):
            member, must = members[number]
            if must:
                options, can_be_empty = [], False
            if number <= num_leading:
                tail = self._shared(tail) if number < num_leading else tail
                options.append(seq(member, tail))
            following = seq(comma, member)
            tail = seq(following if must else optional(following), tail)
        return (choice(options) if options else None), can_be_empty

    def _shared(self, tail: Expression) -> Expression:
        """What follows one of several first members is written down once."""
        if tail == Text(""):
            return tail
        name = f"t{len(self.rules)}"
        if len(self.rules) >= MAX_RULES:
            raise self.refuse("too many optional properties come first")
        self.rules[name] = tail
        return Call(name)
