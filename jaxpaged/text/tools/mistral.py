"""mistral: `[TOOL_CALLS]` and then a list of calls, or `name{...}`, or `name[ARGS]{...}`."""

import re
import secrets
import string

from jaxpaged.text.text_reader import Malformed, Steps, TextReader
from jaxpaged.text.tools.calls import Calls, attempt, json_arguments, json_call

OPEN = "[TOOL_CALLS]"
ID_LEN = 9  # characters; Mistral's templates refuse other ids
_ID_CHARACTERS = string.ascii_letters + string.digits
_MAX_NAME = 256
_NAME = re.compile(r"[\w.:/-]+")


def new_mistral_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(ID_LEN))


def read_mistral(reader: TextReader, calls: Calls) -> Steps[None]:
    """Content and calls."""
    calls.new_id = new_mistral_id
    while (yield from reader.until((OPEN,), calls.content)):
        reader.mark()
        yield from reader.skip()
        is_list = yield from reader.take_if("[")
        reading = json_call(reader, calls) if is_list else _one(reader, calls)
        is_call = yield from attempt(reader, calls, reading, OPEN)
        while is_call and is_list:
            reader.mark()
            yield from reader.skip()
            if not (yield from reader.take_if(",")):
                yield from reader.take_if("]")
                break
            is_call = yield from attempt(reader, calls, json_call(reader, calls), "")
        reader.unmark()


def _one(reader: TextReader, calls: Calls) -> Steps[None]:
    name = ""
    while (yield from reader.peek()) not in ("{", "["):
        name += yield from reader.take()
        if len(name) > _MAX_NAME:
            raise Malformed
    if not name:
        yield from json_call(reader, calls)
        return
    if not _NAME.fullmatch(name.strip()):
        raise Malformed
    calls.name(name.strip())
    if (yield from reader.take_if("[CALL_ID]")):
        yield from reader.until(("[",), lambda text: None)
        yield from reader.expect("ARGS]")
    else:
        yield from reader.take_if("[ARGS]")
    yield from json_arguments(reader, calls)
