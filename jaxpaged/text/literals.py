"""Control tokens that somebody typed into a message: they stay text.

A message may hold the characters of a control token, and after the template nobody could tell it
from the template's own. So they are marked before rendering and encoded apart after it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxpaged.errors import RequestError
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import Tokenizer

TYPED_ROLES = ("user", "tool", "function")  # whose words come from outside
_MARKS = range(0xF0000, 0xF0100)  # private characters, of which two that no message holds are taken


def render_literally(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    most: int | None = None,
    /,  # options have names that clients choose
    **options: Any,
) -> tuple[str, list[int]]:
    """A conversation's text and token ids; `options` as for `ChatTemplate.render`.

    The template writes control tokens itself, BOS included; those inside what users and tools say
    become the tokens of their characters.

    Raises:
        RequestError: the text has over `most` characters; it has not been encoded then.
    """
    control = tokenizer.control_pattern
    if control is None or not any(control.search(text) for text in _typed_texts(messages)):
        text = _bounded(template.render(messages, **options), most)
        return text, tokenizer.encode(text, add_special_tokens=False)
    begin, end = _unused_marks(messages)
    marked = [_marked(message, control, begin, end) for message in messages]
    pieces = re.split(f"{begin}|{end}", _bounded(template.render(marked, **options), most))
    ids: list[int] = []
    for place, piece in enumerate(pieces):  # each second one was typed
        if place % 2:
            ids += tokenizer.encode_literally(piece)
        elif piece:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return "".join(pieces), ids


def _bounded(text: str, most: int | None) -> str:
    if most is not None and len(text) > most:
        raise RequestError(
            f"messages and tools make {len(text)} characters with the chat template, over the "
            f"{most} that the model's maximum context length can hold: shorten them",
            param="messages",
        )
    return text


def _typed_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        if message.get("role") in TYPED_ROLES:
            texts += _strings(message.get("content"))
    return texts


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in cast("list[Any]", value) for text in _strings(item)]
    if isinstance(value, dict):
        return [text for item in cast("dict[str, Any]", value).values() for text in _strings(item)]
    return []


def _marked(
    message: Mapping[str, Any], control: re.Pattern[str], begin: str, end: str
) -> Mapping[str, Any]:
    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return control.sub(lambda found: f"{begin}{found[0]}{end}", value)
        if isinstance(value, list):
            return [mark(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {name: mark(item) for name, item in cast("dict[str, Any]", value).items()}
        return value

    if message.get("role") not in TYPED_ROLES:
        return message
    return {**message, "content": mark(message.get("content"))}


def _unused_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    used = set("".join(_strings([dict(message) for message in messages])))
    begin, end, *_ = [chr(code) for code in _MARKS if chr(code) not in used] + ["", ""]
    return begin, end
