"""Input lines of a batch job: what each asks, or why it cannot be read.

A line is OpenAI's batch format (`custom_id`, `method`, `url`, `body`) or a completion body of its
own, `{"prompt": ...}`, perhaps with a `custom_id`.
"""

import codecs
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from jaxpaged.openai.json_bounds import out_of_bounds

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ID = 512  # characters


@dataclass(frozen=True)
class Line:
    """A request of the file. `number` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    reason: str


def read_lines(
    lines: Iterable[bytes], urls: Collection[str] = (COMPLETIONS, CHAT)
) -> Iterator[Line | BadLine]:
    """Every line that is not blank, in order. A custom_id seen before makes a bad line.

    A byte order mark before the first line is passed over.
    """
    seen: dict[str, int] = {}
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        line = _read(number, raw, urls)
        if isinstance(line, Line):
            before = seen.setdefault(line.custom_id, number)
            if before != number:
                reason = f"custom_id {line.custom_id!r} stands in line {before} already"
                line = BadLine(number, line.custom_id, reason)
        yield line


def _read(number: int, raw: bytes, urls: Collection[str]) -> Line | BadLine:
    found = out_of_bounds(raw)
    if found is not None:
        return BadLine(number, None, found)
    try:
        given: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadLine(number, None, f"no valid JSON: {error}")
    if not isinstance(given, dict):
        return BadLine(number, None, f"a JSON {_kind(given)}, expected an object")
    fields = cast("dict[str, Any]", given)
    custom_id = fields.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID):
        return BadLine(number, None, f"custom_id must be text of 1 to {MAX_ID} characters")
    if "body" not in fields and "prompt" in fields and COMPLETIONS in urls:
        body = {name: value for name, value in fields.items() if name != "custom_id"}
        return Line(number, custom_id or f"line-{number}", COMPLETIONS, body)
    return _read_batch_line(number, custom_id, fields, urls)


def _read_batch_line(
    number: int, custom_id: str | None, fields: dict[str, Any], urls: Collection[str]
) -> Line | BadLine:
    body, url = fields.get("body"), fields.get("url")
    if not isinstance(body, dict):
        wanted = "an object in 'body', or 'prompt'"
        return BadLine(number, custom_id, f"'body' is a JSON {_kind(body)}, expected {wanted}")
    if custom_id is None:
        return BadLine(number, None, "custom_id is missing")
    if fields.get("method", "POST") != "POST":
        return BadLine(number, custom_id, f"method is {fields['method']!r}, allowed is POST")
    if url not in urls:
        return BadLine(number, custom_id, f"url is {url!r}, allowed: {' and '.join(urls)}")
    return Line(number, custom_id, str(url), cast("dict[str, Any]", body))


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "list": "array", "str": "string", "bool": "boolean"}
    return names.get(type(value).__name__, "number" if isinstance(value, int | float) else "object")
