"""hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3 write."""

from jaxpaged.text.text_reader import SPACE, Steps, TextReader
from jaxpaged.text.tools.calls import Calls, attempt, json_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(reader: TextReader, calls: Calls) -> Steps[None]:
    """Content and calls."""
    while (yield from reader.until((OPEN,), calls.content)):
        reader.mark()
        if (yield from attempt(reader, calls, json_call(reader, calls), OPEN)):
            yield from close_tag(reader)


def close_tag(reader: TextReader) -> Steps[None]:
    """Go past the end of a call, and past braces too many, which models do write."""
    yield from reader.skip(SPACE + "}")
    yield from reader.take_if(CLOSE)
