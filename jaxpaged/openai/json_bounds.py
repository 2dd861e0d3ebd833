"""How deep and how large a JSON text may be, looked at before anything is made of it.

What reads bodies here walks them by recursion, templates and grammars too, so depth has a bound.
Each value costs time in which nobody else is served, so their number has one; texts may be long.
"""

import numpy as np

MAX_NESTING = 128  # objects and lists within each other
MAX_PARTS = 2**17  # texts, names of fields, objects and lists
MAX_VALUES = 2**21  # numbers as well: the token ids of a very long prompt

_TOO_DEEP = f"nested over {MAX_NESTING} objects and lists deep: flatten it"
_TOO_MANY = (
    f"made of over {MAX_PARTS} texts, objects and lists, or over {MAX_VALUES} values: send less at "
    "once"
)
_PLAIN = bytes(set(range(256)) - set(b'[]{},"'))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def out_of_bounds(data: bytes) -> str | None:
    """What is too much about a JSON text, in words that follow "it is"; what is no JSON may be."""
    if len(data) <= MAX_PARTS and data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return None  # as nearly always
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    marks = bare.translate(None, _PLAIN)
    num_texts = marks.count(b'"') // 2
    if num_texts > MAX_PARTS:
        return _TOO_MANY
    outside = b"".join(marks.split(b'"')[::2])
    num_opened = outside.count(b"[") + outside.count(b"{")
    if num_texts + num_opened > MAX_PARTS or outside.count(b",") >= MAX_VALUES:
        return _TOO_MANY
    depths = np.cumsum(_STEPS[np.frombuffer(outside, np.uint8)], dtype=np.int32)
    return _TOO_DEEP if num_opened and int(depths.max()) > MAX_NESTING else None
