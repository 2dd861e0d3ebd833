"""Answers that a grammar holds to calls: tool_choice required, or one tool by name."""

from jaxpaged.text.text_reader import Steps, TextReader
from jaxpaged.text.tools.calls import Calls, attempt, json_arguments, json_call


def read_required(reader: TextReader, calls: Calls) -> Steps[None]:
    """A JSON list of `{"name": ..., "parameters": {...}}`."""
    opening = "["
    reader.mark()
    while (yield from attempt(reader, calls, _item(reader, calls, opening), "")):
        reader.mark()
        opening = ","
    if calls.num_ended:
        yield from reader.skip()
        yield from reader.take_if("]")
    yield from reader.until((), calls.content)


def _item(reader: TextReader, calls: Calls, opening: str) -> Steps[None]:
    yield from reader.expect(opening)
    yield from json_call(reader, calls)


def read_named(name: str):
    """Reads an answer that is the arguments of one tool."""

    def read(reader: TextReader, calls: Calls) -> Steps[None]:
        reader.mark()
        yield from attempt(reader, calls, _arguments(reader, calls, name), "")
        yield from reader.until((), calls.content)

    return read


def _arguments(reader: TextReader, calls: Calls, name: str) -> Steps[None]:
    calls.name(name)
    yield from json_arguments(reader, calls)
