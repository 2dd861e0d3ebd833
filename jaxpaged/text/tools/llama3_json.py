"""llama3_json: `{"name": ..., "parameters": {...}}`, several with `;` between them."""

from jaxpaged.text.text_reader import SPACE, Steps, TextReader
from jaxpaged.text.tools.calls import Calls, attempt, json_call

TAG = "<|python_tag|>"


def read_llama3_json(reader: TextReader, calls: Calls) -> Steps[None]:
    """Calls where the answer begins with one, or after the tag; a brace is weak evidence, so the
    name must be a tool's.
    """
    opening = ""
    while True:
        reader.mark()
        while (yield from _attempt(reader, calls, opening)):
            opening = ""
            yield from reader.skip(SPACE + ";")
            reader.mark()
        opening = yield from reader.until((TAG,), calls.content)
        if not opening:
            return


def _attempt(reader: TextReader, calls: Calls, opening: str) -> Steps[bool]:
    return attempt(reader, calls, json_call(reader, calls, known_only=True), opening)
