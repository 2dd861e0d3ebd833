"""JSON Schema as a grammar, for the parts of it that can be held to token by token.

Properties come in the order of the schema. An object whose schema lists properties has no others
unless `additionalProperties` allows them. Numbers have at most 15 digits before their point.
"""

import json
from functools import partial
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.text.grammars.expressions import (
    Call,
    Expression,
    Grammar,
    Repeat,
    Text,
    Unit,
    choice,
    optional,
    seq,
    without_dead_ends,
)
from jaxpaged.text.grammars.json_leaves import (
    count,
    is_of,
    number_expression,
    string_expression,
)
from jaxpaged.text.grammars.json_objects import MAX_RULES, ObjectSchema
from jaxpaged.text.grammars.json_text import JsonStyle, literal
from jaxpaged.text.grammars.merging import ANNOTATIONS, are_apart, merged
from jaxpaged.text.grammars.refusal import not_served, refusal

MAX_BYTES = 200_000  # of a schema
MAX_DEPTH = 60  # schemas one in another

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_BY_KEYWORD = {
    "properties": "object", "required": "object", "additionalProperties": "object",
    "minProperties": "object", "maxProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "pattern": "string", "minLength": "string", "maxLength": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number",
    "exclusiveMaximum": "number", "multipleOf": "number",
}  # fmt: skip
_SERVED = {*_BY_KEYWORD, *ANNOTATIONS, "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}


def json_schema_grammar(
    schema: Any, style: JsonStyle, *, param: str, closes_objects: bool = False
) -> Grammar:
    """The grammar of all JSON texts that `schema` allows, in one order of members.

    Args:
        closes_objects: no additional properties anywhere, whatever the schema says.

    Raises:
        RequestError: no schema, or one that nothing fits.
        UnsupportedParameter: a keyword that is not served; the text names it and its place.
    """
    if not isinstance(schema, dict | bool):
        raise refusal(f"{param} must be a JSON schema: an object")
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        raise refusal(f"{param} has {size} bytes, allowed are {MAX_BYTES}")
    return _Translation(schema, style, param, closes_objects).grammar()


class _Translation:
    """One schema on its way; `rules` by name, for what is referred to.

    A part that nothing fits is an empty choice, of which the grammar keeps no trace.
    """

    def __init__(self, schema: Any, style: JsonStyle, param: str, closes_objects: bool):
        self.schema, self.style, self.param = schema, style, param
        self.closes_objects = closes_objects
        self.rules: dict[str, Expression] = {}
        self._names: dict[str, str] = {}
        self._nothing: list[RequestError] = []  # of parts that nothing fits

    def grammar(self) -> Grammar:
        whole = Grammar(self.expression(self.schema, "#", 0), self.rules)
        found = without_dead_ends(whole)
        if found is None and self._nothing:
            raise self._nothing[0]
        return found or whole  # of which whoever follows it tells that it has no end

    def refuse(self, place: str, what: str) -> RequestError:
        return not_served(f"{self.param}: {place}: {what}")

    def nothing(self, place: str, why: str) -> Expression:
        self._nothing.append(self.refuse(place, why))
        return choice([])

    def expression(self, schema: Any, place: str, depth: int) -> Expression:
        """The texts of one schema, which stands at `place`."""
        return Unit(self._translated(schema, place, depth))

    def _translated(self, schema: Any, place: str, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise self.refuse(place, f"schemas are nested deeper than {MAX_DEPTH}")
        schema = _constraints(schema)
        if schema is True or schema == {}:
            return self.style.any_value(self.rules)
        if schema is False:
            return self.nothing(place, "nothing fits this schema")
        self._check(schema, place)
        if "$ref" in schema and len(schema) == 1:
            return self._call(schema["$ref"], place, depth)
        for name in ("$ref", "allOf"):
            if name in schema:
                return self.expression(self._joined(schema, name, place), place, depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._branches(schema, name, place, depth)
        if "enum" in schema or "const" in schema:
            return self._given(schema, place)
        return self._typed(schema, place, depth)

    def _check(self, schema: Any, place: str) -> None:
        if not isinstance(schema, dict):
            raise self.refuse(place, "a schema is an object, true or false")
        unknown = sorted(schema.keys() - _SERVED)
        if schema.get("uniqueItems") is False:
            unknown.remove("uniqueItems")
        if unknown:
            raise self.refuse(place, f"{', '.join(unknown)} is not served in a schema")

    def _resolve(self, reference: Any, place: str) -> Any:
        found: Any = self.schema
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self.refuse(place, f"$ref {reference!r}: only '#/...' is served")
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise self.refuse(place, f"$ref {reference!r} leads nowhere")
        return found

    def _call(self, reference: Any, place: str, depth: int) -> Expression:
        found = self._resolve(reference, place)
        if reference not in self._names:
            if len(self._names) >= MAX_RULES:
                raise self.refuse(place, f"over {MAX_RULES} schemas are referred to")
            name = self._names[reference] = f"r{len(self._names)}"
            self.rules[name] = self.expression(found, reference, depth + 1)
        return Call(self._names[reference])

    def _joined(self, schema: dict[str, Any], name: str, place: str) -> Any:
        """`schema` with what `$ref` or `allOf` adds to it merged in."""
        rest = {key: value for key, value in schema.items() if key != name}
        parts = schema[name] if name == "allOf" else [self._resolve(schema[name], place)]
        if not isinstance(parts, list):
            raise self.refuse(place, "allOf must be a list of schemas")
        for _ in range(MAX_DEPTH):
            references = [p for p in parts if isinstance(p, dict) and "$ref" in p]
            if not references:
                break
            parts = [q for p in parts for q in self._without_reference(p, place)]
        else:
            raise self.refuse(place, "its references go round in a circle")
        for part in parts:
            rest = merged(rest, part, lambda what: self.refuse(place, what))
        return rest

    def _without_reference(self, part: Any, place: str) -> list[Any]:
        if not isinstance(part, dict) or "$ref" not in part:
            return [part]
        rest = {key: value for key, value in part.items() if key != "$ref"}
        return [self._resolve(part["$ref"], place), rest]

    def _branches(self, schema: dict[str, Any], name: str, place: str, depth: int) -> Expression:
        rest = {key: value for key, value in schema.items() if key != name}
        branches = schema[name]
        if not isinstance(branches, list) or not branches:
            raise self.refuse(place, f"{name} must be a list of schemas")
        if name == "oneOf":
            plain = [self._joined({"allOf": [b]}, "allOf", place) for b in branches]
            if not all(are_apart(a, b) for i, a in enumerate(plain) for b in plain[:i]):
                raise self.refuse(
                    place,
                    "oneOf is served only where its branches differ in type or in a constant "
                    "property: use anyOf",
                )
        if rest:
            branches = [{**rest, "allOf": [branch]} for branch in branches]
        options = [
            self.expression(branch, f"{place}/{name}/{i}", depth + 1)
            for i, branch in enumerate(branches)
        ]
        return choice(options)

    def _given(self, schema: dict[str, Any], place: str) -> Expression:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise self.refuse(place, "enum must be a list of values")
        more = sorted(schema.keys() - {"const", "enum", "type"})
        if more:
            raise self.refuse(place, f"{', '.join(more)} beside enum or const is not served")
        kinds = self._types(schema, place) if "type" in schema else TYPES
        values = [value for value in values if any(is_of(kind, value) for kind in kinds)]
        try:
            if "const" in schema:
                values = [v for v in values if literal(v) == literal(schema["const"])]
            found = [self.style.value(value) for value in values]
        except ValueError:
            raise self.refuse(place, "enum or const holds NaN or an infinity") from None
        if not found:
            return self.nothing(place, "no value of enum or const is of the type")
        return choice(found)

    def _types(self, schema: dict[str, Any], place: str) -> list[str]:
        if "type" not in schema:
            return sorted({_BY_KEYWORD[key] for key in schema})
        given = schema["type"]
        kinds = given if isinstance(given, list) else [given]
        if not kinds or not all(isinstance(k, str) and k in TYPES for k in kinds):
            raise self.refuse(place, f"type is {given!r}, allowed are {', '.join(TYPES)}")
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        return kinds

    def _typed(self, schema: dict[str, Any], place: str, depth: int) -> Expression:
        options: list[Expression] = []
        refuse = partial(self.refuse, place)
        for kind in self._types(schema, place):
            match kind:
                case "object":
                    options.append(self._object(schema, place, depth))
                case "array":
                    options.append(self._array(schema, place, depth))
                case "string":
                    found = string_expression(schema, self.param, refuse)
                    options.append(found or self.nothing(place, "minLength is over maxLength"))
                case "number" | "integer":
                    found = number_expression(schema, kind, refuse)
                    why = "no number lies between its bounds"
                    options.append(found or self.nothing(place, why))
                case "boolean":
                    options += [Text("true"), Text("false")]
                case _:
                    options.append(Text("null"))
        return choice(options)

    def _object(self, schema: dict[str, Any], place: str, depth: int) -> Expression:
        return ObjectSchema(
            schema,
            self.style,
            self.rules,
            lambda inner, where: self.expression(inner, f"{place}/{where}", depth + 1),
            partial(self.refuse, place),
            closes=self.closes_objects,
        ).expression()

    def _array(self, schema: dict[str, Any], place: str, depth: int) -> Expression:
        refuse = partial(self.refuse, place)
        least, most = (count(schema, name, refuse) for name in ("minItems", "maxItems"))
        least, first = least or 0, schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise self.refuse(place, "prefixItems must be a list of schemas")
        items, style = schema.get("items", True), self.style
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            return self.nothing(place, "no number of items fits")
        places = [f"{place}/prefixItems/{i}" for i in range(len(first))]
        parts = [self.expression(s, p, depth + 1) for s, p in zip(first, places, strict=True)]
        more = (most is None or most > len(parts)) and items is not False
        item = self.expression(items, f"{place}/items", depth + 1) if more else None
        if not parts and item is not None:
            full = style.listed("[", style.repeated(item, max(least, 1), most), "]")
            return full if least else choice([Text("[]"), full])
        tail: Expression = Text("")
        if item is not None:
            room = None if most is None else most - len(parts)
            tail = Repeat(seq(style.mark(","), item), max(least - len(parts), 0), room)
        for number in range(min(len(parts), len(parts) if most is None else most), 1, -1):
            tail = seq(style.mark(","), parts[number - 1], tail)
            tail = tail if number <= least else optional(tail)
        if not parts or most == 0:
            return Text("[]")
        full = style.listed("[", seq(parts[0], tail), "]")
        return full if least else choice([Text("[]"), full])


def _constraints(schema: Any) -> Any:
    """`schema` without remarks; an `allOf` of one, by itself, is that one."""
    while isinstance(schema, dict):
        schema = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        every = schema.get("allOf")
        if len(schema) != 1 or not isinstance(every, list) or len(every) != 1:
            break
        schema = every[0]
    return schema
