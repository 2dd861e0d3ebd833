"""`format` of strings, where it is held to. Others are remarks, as JSON Schema says."""

from jaxpaged.text.grammars.expressions import Expression
from jaxpaged.text.grammars.regex import parse_regex

_DATE = (
    r"[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,8}}"

_PATTERNS = {
    "date": _DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DATE}T{_CLOCK}{_ZONE}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": _HOST,
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(?:\.[a-zA-Z0-9_+-]{{1,32}}){{0,4}}@{_HOST}",
}
FORMATS: dict[str, Expression] = {
    name: parse_regex(pattern, param="format") for name, pattern in _PATTERNS.items()
}
