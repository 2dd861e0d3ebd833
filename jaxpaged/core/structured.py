"""What an answer must look like, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import RequestError


@dataclass(frozen=True)
class ReasoningMarks:
    """An answer begins with reasoning, which no grammar holds, up to the mark `end`.

    The prompt has written `begin` already where `is_open`; else the answer may begin with it.
    """

    begin: str
    end: str
    is_open: bool
    max_tokens: int | None  # of the reasoning between the marks; None: no limit


MAX_CHOICES = 10_000
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of `json` (a schema), `regex`, `choice`, `grammar` (Lark or EBNF), `json_object`,
    `structural_tag` (JSON text with structures and triggers: free text, but for what is tagged).

    White space in JSON is one space, or a new line with its indentation, unless
    `whitespace_pattern` says otherwise.

    Raises:
        RequestError: none of them, several, or one of another type; `param` names the field.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self):
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {', '.join(given) or 'nothing'}: give exactly one of "
                f"{', '.join(_KINDS)}",
                param="structured_outputs",
            )
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            _check(name, getattr(self, name), str)
        _check("json", self.json, str | Mapping)
        _check("choice", self.choice, Sequence)
        if self.choice is not None:
            self._check_choice(self.choice)

    def _check_choice(self, words: Sequence[Any]) -> None:
        if not isinstance(words, str) and len(words) > MAX_CHOICES:
            raise RequestError(
                f"choice has {len(words)} texts, at most {MAX_CHOICES} are allowed",
                param="structured_outputs",
            )
        is_text = all(isinstance(word, str) and word for word in words)
        if isinstance(words, str) or not is_text or not words:
            raise RequestError(
                f"choice must be a list of 1 to {MAX_CHOICES} texts, none of them empty",
                param="structured_outputs",
            )


def _check(name: str, value: Any, kind: Any) -> None:
    if value is not None and not isinstance(value, kind):
        raise RequestError(
            f"structured_outputs.{name} is {type(value).__name__}, which it may not be",
            param="structured_outputs",
        )
