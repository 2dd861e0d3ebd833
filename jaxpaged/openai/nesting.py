"""How deep a JSON text is nested, before anything is made of it.

What reads bodies here walks them by recursion, templates and grammars too, so depth has a bound.
"""

import numpy as np

MAX_NESTING = 128  # objects and lists within each other
TOO_DEEP = f"nested over {MAX_NESTING} objects and lists deep"

_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def is_too_deep(data: bytes) -> bool:
    """Whether brackets stand deeper within each other than MAX_NESTING; what is no JSON may be."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False  # as nearly always
    bare = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_inside = np.cumsum(bare == ord('"'), dtype=np.uint8) & 1  # a string: its quotes count
    steps = _STEPS[bare]
    brackets = steps[(steps != 0) & (is_inside == 0)]
    return brackets.size > 0 and int(np.cumsum(brackets, dtype=np.int32).max()) > MAX_NESTING
