"""Strings and numbers of a JSON schema, and which values are of which type."""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from jaxpaged.text.grammars import numbers
from jaxpaged.text.grammars.expressions import Expression
from jaxpaged.text.grammars.json_formats import FORMATS
from jaxpaged.text.grammars.json_text import string, string_like
from jaxpaged.text.grammars.regex import parse_regex

type Refuse = Callable[[str], Exception]


def count(schema: dict[str, Any], name: str, refuse: Refuse) -> int | None:
    value = schema.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (type(value) is not int or value < 0):
        raise refuse(f"{name} is {value!r}: it must be a whole number, 0 or more")
    return value


def string_expression(schema: dict[str, Any], param: str, refuse: Refuse) -> Expression | None:
    """The strings of a schema; None where lengths leave none."""
    least, most = (count(schema, name, refuse) for name in ("minLength", "maxLength"))
    content = None
    for name in ("pattern", "format"):
        if not isinstance(schema.get(name, ""), str):
            raise refuse(f"{name} must be text")
    if "pattern" in schema:
        content = parse_regex(schema["pattern"], param=param, is_search=True)
    elif schema.get("format") in FORMATS:
        content = FORMATS[schema["format"]]
    if content is None:
        if most is not None and most < (least or 0):
            return None
        return string(least or 0, most)
    if least or most is not None:
        raise refuse("minLength and maxLength beside pattern or format: put the "
                          "lengths into the pattern")  # fmt: skip
    return string_like(content)


def number_expression(schema: dict[str, Any], kind: str, refuse: Refuse) -> Expression | None:
    """The numbers of a schema; None where none lies between its bounds."""
    low, opens = _bound(schema, "minimum", "exclusiveMinimum", refuse)
    high, closes = _bound(schema, "maximum", "exclusiveMaximum", refuse)
    unit = schema.get("multipleOf", 1 if kind == "integer" else None)
    places = None
    if unit is not None:
        places = _decimal_places(unit)
        if places is None or (kind == "integer" and places):
            raise refuse(f"multipleOf {unit!r} is not served: 1, 0.1, 0.01... are")
    if kind == "integer" or places == 0:
        if low is None and high is None:
            return numbers.INTEGER
        first = None if low is None else math.floor(low) + 1 if opens else math.ceil(low)
        last = None if high is None else math.ceil(high) - 1 if closes else math.floor(high)
        return numbers.integers(first, last)
    if low is None and high is None and places is None:
        return numbers.NUMBER
    return numbers.decimals(low, high, opens=opens, closes=closes, places=places)


def _bound(
    schema: dict[str, Any], inclusive: str, exclusive: str, refuse: Refuse
) -> tuple[Decimal | None, bool]:
    """The tighter of two bounds, and whether it is excluded itself."""
    found: list[tuple[Decimal, bool]] = []
    for name in (inclusive, exclusive):
        value = schema.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(f"{name} is {value!r}: it must be a number")
        if not math.isfinite(value) or abs(value) > numbers.LARGEST:
            raise refuse(f"{name} is outside +-{numbers.LARGEST}")
        found.append((Decimal(repr(value)), name == exclusive))
    if not found:
        return None, False
    return max(found) if inclusive == "minimum" else min(found, key=lambda f: (f[0], not f[1]))


def is_of(kind: str, value: Any) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            is_whole = isinstance(value, float) and value.is_integer()
            return is_whole or (isinstance(value, int) and not isinstance(value, bool))
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal_places(unit: Any) -> int | None:
    """How many digits behind the point the multiples of a power of ten have; None for others."""
    if isinstance(unit, bool) or not isinstance(unit, int | float) or unit <= 0:
        return None
    sign, digits, exponent = Decimal(repr(unit)).normalize().as_tuple()
    is_power = not sign and digits == (1,) and isinstance(exponent, int) and exponent <= 0
    return -int(exponent) if is_power else None
