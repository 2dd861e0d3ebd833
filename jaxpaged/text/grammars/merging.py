"""Two JSON schemas at once, and whether two can hold for the same value."""

from collections.abc import Callable
from typing import Any

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "$schema", "$id", "$comment", "$defs", "definitions", "discriminator",
     "contentMediaType", "contentEncoding", "x-guidance", "$anchor"}
)  # fmt: skip
_LARGER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_SMALLER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_CHOSEN = ("enum", "type")  # from a list; None in common leaves nothing
_SIMPLE = ("string", "boolean", "null", "object", "array")


def merged(a: Any, b: Any, refusal: Callable[[str], Exception]) -> Any:
    """A schema for what fits both `a` and `b`; False where that is seen to be nothing."""
    if a is False or b is False:
        return False
    if a is True or b is True:
        return b if a is True else a
    if not isinstance(a, dict) or not isinstance(b, dict):
        raise refusal("allOf holds what is no schema")
    for schema in (a, b):
        _check_forms(schema, refusal)
    both = dict(a)
    for name, value in b.items():
        if name in ANNOTATIONS:
            continue
        if name not in both or both[name] == value:
            both[name] = value
        elif name == "const":
            return False
        else:
            both[name] = _both(name, both[name], value, refusal)
            if name in _CHOSEN and not both[name]:
                return False
    return both


def _check_forms(schema: dict[str, Any], refusal: Callable[[str], Exception]) -> None:
    """Refuse keywords whose values cannot be merged or compared."""
    for name, value in schema.items():
        if name in _LARGER | _SMALLER:
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
        elif name == "type":
            is_right = isinstance(value, str) or _are_texts(value)
        elif name == "required":
            is_right = _are_texts(value)
        elif name in ("enum", "allOf"):
            is_right = isinstance(value, list)
        else:
            is_right = name != "properties" or isinstance(value, dict)
        if not is_right:
            raise refusal(f"{name} is {str(value)[:40]}, which it may not be")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _both(name: str, a: Any, b: Any, refusal: Callable[[str], Exception]) -> Any:
    if name in _LARGER:
        return max(a, b)
    if name in _SMALLER:
        return min(a, b)
    if name == "required":
        return [*a, *(item for item in b if item not in a)]
    if name == "properties":
        return a | {key: merged(a.get(key, {}), value, refusal) for key, value in b.items()}
    if name in _CHOSEN:
        first, second = (x if isinstance(x, list) else [x] for x in (a, b))
        common = [item for item in first if item in second]
        if name == "type" and not common and {*first, *second} >= {"number", "integer"}:
            common = ["integer"]
        return common
    if name == "allOf":
        return [*a, *b]
    raise refusal(f"{name} is given twice, differently: that is not served")


def are_apart(a: Any, b: Any) -> bool:
    """No value fits both, as far as types and constants of properties tell."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    first, second = _values(a), _values(b)
    if first is not None and second is not None:
        return not any(x == y for x in first for y in second)
    kinds, others = _kinds(a), _kinds(b)
    if kinds and others and not kinds & others:
        return True
    if kinds != {"object"} or others != {"object"}:
        return False
    needed = set(a.get("required", [])) & set(b.get("required", []))
    properties = a.get("properties", {}), b.get("properties", {})
    return any(
        name in properties[0] and name in properties[1] and _differ(*(p[name] for p in properties))
        for name in needed
    )


def _differ(a: Any, b: Any) -> bool:
    first, second = _values(a), _values(b)
    return first is not None and second is not None and not any(x in second for x in first)


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows; empty where it says nothing."""
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given or ())
    if not kinds and (values := _values(schema)) and all(isinstance(v, str) for v in values):
        kinds = {"string"}
    return {"number" if kind == "integer" else kind for kind in kinds}
