"""Random JSON schemas whose parts begin alike: what a lexer or a count of tokens may confuse."""

import random
from typing import Any

NAMES = ("a", "ab", "k", "t", "x y", 'q"t', "größe", "Kind", "back\\slash")
DEFINED = ("d0", "d1", "d2", "d3")
PATTERNS = (
    r"^[a-z]{1,3}$", r"^(a|ab|abc)$", r"x", r"^\d+$", r"^[\"\\]{0,2}$", r"^a.*b$", r"^(k|t)?$",
    r"\n|é", r"^\S+$", r"^[^a]*$",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
SIMPLE = ("string", "number", "integer", "boolean", "null")


def tangled_schema(rng: random.Random) -> dict[str, Any]:
    """Unions of objects that share names, constants beside them, references in a circle.

    Some are not served, or nothing fits them.
    """
    schema = _any(rng, 3)
    defined = {name: _any(rng, 2) for name in DEFINED}
    return {**(schema if isinstance(schema, dict) else {}), "$defs": defined}


def _any(rng: random.Random, depth: int) -> Any:
    kinds = [_string, _number, _simple, _enum, _enum]
    if depth:
        kinds += [_object] * 3 + [_array] * 2 + [_union] * 4 + [_reference] * 2
        kinds += [_open, _types, _told_apart, _joined]
    return rng.choice(kinds)(rng, depth)


def _simple(rng: random.Random, _: int) -> Any:
    return rng.choice([{"const": rng.choice([*NAMES, 1, 12, 1.5])}, {"type": rng.choice(SIMPLE)}])


def _string(rng: random.Random, _: int) -> Any:
    least = rng.randrange(4)
    return {"type": "string"} | rng.choice(
        [
            {"minLength": least, "maxLength": least + rng.randrange(4)},
            {"pattern": rng.choice(PATTERNS)},
            {"format": rng.choice(FORMATS)},
        ]
    )


def _number(rng: random.Random, _: int) -> Any:
    schema: dict[str, Any] = {"type": rng.choice(["number", "integer", ["integer", "null"]])}
    low = rng.choice([-1000, -10, -1.5, -0.25, 0, 0.1, 3, 9, 99.95, 12345.678])
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        high = low + rng.choice([0, 0.001, 0.5, 2, 12, 200.25])
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    if schema["type"] == "number" and rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([0.1, 0.01, 1])
    return schema


def _value(rng: random.Random, depth: int) -> Any:
    if not depth or rng.random() < 0.4:
        return rng.choice([1, 12, 1.5, -7, 0, "", "a", "ab", 'a"b', "数", True, None, [], {}])
    if rng.random() < 0.6:
        return {name: _value(rng, depth - 1) for name in rng.sample(NAMES[:6], rng.randrange(4))}
    return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]


def _enum(rng: random.Random, _: int) -> Any:
    return {"enum": [_value(rng, 2) for _ in range(rng.randrange(1, 5))]}


def _object(rng: random.Random, depth: int, names: tuple[str, ...] = NAMES) -> Any:
    chosen = rng.sample(names, rng.randrange(min(5, len(names) + 1)))
    schema: dict[str, Any] = {"type": "object"}
    if chosen or rng.random() < 0.5:
        schema["properties"] = {name: _any(rng, depth - 1) for name in chosen}
        schema["required"] = [name for name in chosen if rng.random() < 0.45]
    if rng.random() < 0.4:
        choices = [False, True, {"type": "integer"}, _any(rng, depth - 1), _any(rng, depth - 1)]
        schema["additionalProperties"] = rng.choice(choices)
    if rng.random() < 0.1:
        schema["maxProperties"] = len(chosen) + rng.randrange(3)
    if rng.random() < 0.1:
        schema["minProperties"] = 1
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.4:
        schema["prefixItems"] = [_any(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if rng.random() < 0.8:
        schema["items"] = _any(rng, depth - 1)
    elif "prefixItems" in schema:
        schema["items"] = False
    if rng.random() < 0.5:
        schema["minItems"] = rng.randrange(4)
        schema["maxItems"] = schema["minItems"] + rng.randrange(7)
    return schema


def _union(rng: random.Random, depth: int) -> Any:
    names = tuple(rng.sample(NAMES, 3))
    branches: list[Any] = []
    for _ in range(rng.randrange(1, 4)):
        given = {name: _value(rng, 1) for name in rng.sample(names, rng.randrange(3))}
        branches += rng.choices(
            [_object(rng, depth, names), {"const": given}, _any(rng, depth - 1)], [3, 1, 2]
        )
    return {"anyOf": branches}


def _told_apart(rng: random.Random, depth: int) -> Any:
    branches: list[Any] = []
    for number in range(rng.randrange(2, 4)):
        branch = _object(rng, depth, NAMES[:3])
        branch["properties"] = {"t": {"const": f"v{number}"}, **branch.get("properties", {})}
        branch["required"] = ["t", *branch.get("required", [])]
        branches.append({k: v for k, v in branch.items() if k != "maxProperties"})
    return {"oneOf": branches}


def _joined(rng: random.Random, depth: int) -> Any:
    wanted = ("type", "properties", "required")
    parts = [_object(rng, depth, names) for names in (NAMES[:3], NAMES[3:6])]
    a, b = ({k: v for k, v in part.items() if k in wanted} for part in parts)
    return rng.choice([{"allOf": [a, b]}, {"allOf": [a], **b}])


def _types(rng: random.Random, _: int) -> Any:
    return {"type": rng.sample([*SIMPLE, "array", "object"], 2)}


def _open(rng: random.Random, _: int) -> Any:
    return rng.choice([{}, True, {"type": "object"}, {"type": "array"}])


def _reference(rng: random.Random, _: int) -> Any:
    schema = {"$ref": f"#/$defs/{rng.choice(DEFINED)}"}
    return rng.choice([schema, schema, {"allOf": [schema]}])
