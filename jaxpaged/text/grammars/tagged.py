"""`structural_tag`: free text in which certain words begin a part that a JSON schema holds."""

import json
from collections.abc import Mapping
from typing import Any, cast

from llguidance import StructTag

from jaxpaged.text.grammars.json_schema import json_schema_grammar
from jaxpaged.text.grammars.json_text import JsonStyle
from jaxpaged.text.grammars.lark import to_lark
from jaxpaged.text.grammars.refusal import refusal

MAX_TAGS = 128
_SHAPE = (
    'structural_tag must be {"structures": [{"begin": TEXT, "schema": {...}, "end": TEXT}], '
    '"triggers": [TEXT]}'
)


def tagged_grammar(text: str, style: JsonStyle, most: int) -> str:
    """llguidance's grammar for a structural tag, given as JSON text of `most` characters or fewer.

    Raises:
        RequestError: another shape, or a schema that is not served.
    """
    if len(text) > most:
        raise refusal(f"structural_tag has {len(text)} characters, allowed are {most}")
    try:
        given: Any = json.loads(text)
        structures, triggers = given["structures"], given["triggers"]
        tags = [_tag(structure, triggers, style) for structure in structures]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise refusal(_SHAPE) from None
    if not 1 <= len(tags) <= MAX_TAGS:
        raise refusal(f"structural_tag has {len(tags)} structures, allowed are 1 to {MAX_TAGS}")
    return StructTag.to_grammar(tags, assume_special=False)


def _tag(structure: Mapping[str, Any], triggers: list[str], style: JsonStyle) -> StructTag:
    begin, end, schema = structure["begin"], structure["end"], structure.get("schema", {})
    if not (isinstance(begin, str) and isinstance(end, str)):
        raise TypeError
    trigger = next((word for word in triggers if word and begin.startswith(word)), None)
    if trigger is None:
        raise refusal(f"structural_tag: {begin[:80]!r} begins with none of the triggers")
    grammar = json_schema_grammar(cast("Any", schema), style, param="structural_tag")
    return StructTag(trigger=trigger, begin=begin, grammar=to_lark(grammar), end=end)
