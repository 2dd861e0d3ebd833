"""Tool calls in an answer's text: a parser that takes the text in pieces, and its formats by name.

Parsing never fails: text that departs from a format before a call is known is content, as it
stands. Where a call has been told already, it keeps the arguments that it has, the beginning of a
JSON object, and what follows is content.
"""

from collections.abc import Callable

from jaxpaged.text.answer_parts import AnswerPart, merged
from jaxpaged.text.text_reader import Steps, TextReader
from jaxpaged.text.tools.calls import Calls, Tools
from jaxpaged.text.tools.forced import read_named, read_required
from jaxpaged.text.tools.hermes import read_hermes
from jaxpaged.text.tools.llama3_json import read_llama3_json
from jaxpaged.text.tools.mistral import read_mistral
from jaxpaged.text.tools.pythonic import read_pythonic
from jaxpaged.text.tools.qwen3 import read_qwen3

type Format = Callable[[TextReader, Calls], Steps[None]]

FORMATS: dict[str, Format] = {
    "hermes": read_hermes,
    "llama3_json": read_llama3_json,
    "mistral": read_mistral,
    "pythonic": read_pythonic,
    "qwen3": read_qwen3,
    "qwen3_coder": read_qwen3,
    "qwen3_xml": read_qwen3,
}
# formats whose marks are special tokens, which the text must show
NEED_SPECIAL_TOKENS = frozenset({"mistral"})

__all__ = [
    "FORMATS", "NEED_SPECIAL_TOKENS", "Format", "ToolParser", "Tools", "read_named",
    "read_required",
]  # fmt: skip


class ToolParser:
    """Reads one answer. However its text is cut into pieces, the joined parts are the same."""

    def __init__(self, read: Format, tools: Tools, *, parallel: bool = True):
        self._reader, self._calls = TextReader(), Calls(tools, parallel)
        self._steps: Steps[None] = read(self._reader, self._calls)

    def push(self, text: str) -> list[AnswerPart]:
        """What more text makes certain."""
        self._reader.push(text)
        self._advance()
        return merged(self._calls.take_parts())

    def finish(self) -> list[AnswerPart]:
        """The rest, where no more text will come."""
        self._reader.end()
        self._advance()
        self._calls.finish()
        return merged(self._calls.take_parts())

    @property
    def has_broken_calls(self) -> bool:
        """Text has begun a call and departed from the format."""
        return self._calls.num_broken > 0

    def _advance(self) -> None:
        next(self._steps, None)
        if self._calls.is_told:
            self._reader.unmark()  # nothing will be taken back: let go of the text
