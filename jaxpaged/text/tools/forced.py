"""Answers that a grammar holds to calls: tool_choice required, or one tool by name."""

from jaxpaged.text.text_reader import Steps, TextReader
from jaxpaged.text.tools.calls import Calls, attempt, json_arguments, json_call, read_list


def read_required(reader: TextReader, calls: Calls) -> Steps[None]:
    """A JSON list of `{"name": ..., "parameters": {...}}`."""
    yield from read_list(reader, calls, json_call)


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
