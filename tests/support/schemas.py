"""Random JSON schemas of the kinds that are served."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema

WORDS = ("a", "id", "name", "größe", 'q"t', "x y", "Kind", "back\\slash", "数据", "n0")

ODD_WORDS = ("naïve", "数据", 'a"b')
SCHEMA_WITH_REFERENCE = {  # its words need escapes, behind a reference
    "$defs": {"w": {"enum": list(ODD_WORDS)}},
    "type": "object",
    "properties": {"w": {"$ref": "#/$defs/w"}},
    "required": ["w"],
    "additionalProperties": False,
}


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema without references, `depth` brackets deep at most."""
    kinds = [_string, _number, _integer, _given, _word, lambda rng: {"type": rng.choice(SIMPLE)}]
    if depth:
        kinds += [_object, _object, _array, _either, _mixed]
    make = rng.choice(kinds)
    return make(rng, depth) if make in (_object, _array, _either, _mixed) else make(rng)


SIMPLE = ("string", "number", "integer", "boolean", "null")


def _string(rng: random.Random) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.randrange(4)
    if kind == 0:
        schema["minLength"] = rng.randrange(6)
        schema["maxLength"] = schema["minLength"] + rng.randrange(6)
    elif kind == 1:
        schema["pattern"] = rng.choice(
            [
                r"^[a-z]{2,4}-\d+$",
                r"^(foo|ba[rz])?$",
                r"x",
                r"^\w+@\w+\.(com|de)$",
                r"^[^a-z]{1,3}$",
            ]
        )
    elif kind == 2:
        schema["format"] = rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])
    return schema


def _integer(rng: random.Random) -> Any:
    low = rng.randrange(-2000, 2000)
    schema = {"type": "integer"}
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + 2 + rng.randrange(300)
    return schema


def _number(rng: random.Random) -> Any:
    low = rng.choice([-10, -1.5, -0.25, 0, 0.1, 3, 99.95])
    schema: dict[str, Any] = {"type": "number"}
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        high = low + rng.choice([0.5, 1, 12, 200.25])
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    if rng.random() < 0.2:
        schema["multipleOf"] = 0.01
    return schema


def _given(rng: random.Random) -> Any:
    values = ["naïve", "数据", 'a"b', 1, 2.5, None, True, {"k": [1, "two"]}, [], {}, -7]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _word(rng: random.Random) -> Any:
    return {"const": rng.choice(WORDS)}


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(WORDS, rng.randrange(5))
    schema: dict[str, Any] = {"type": "object"}
    if names or rng.random() < 0.5:
        schema["properties"] = {name: random_schema(rng, depth - 1) for name in names}
        schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.choice([False, True, {"type": "integer"}])
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth - 1)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randrange(4)
        schema["maxItems"] = schema["minItems"] + rng.randrange(4)
    if rng.random() < 0.2:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return schema


def _either(rng: random.Random, depth: int) -> Any:
    branches = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {"anyOf": branches}


def _mixed(rng: random.Random, depth: int) -> Any:
    first, second = rng.sample(["string", "integer", "null", "array", "boolean"], 2)
    return {"type": [first, second]}


def check_json(text: str | bytes, schema: Any) -> None:
    """Validate with decimal arithmetic: in floats 8.29 is no multiple of 0.01."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    jsonschema.validate(json.loads(text, parse_float=Decimal), exact)
