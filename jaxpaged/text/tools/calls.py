"""The calls of one answer, as a format's reading finds them."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.text.answer_parts import AnswerPart, CallArguments, CallStart, Content
from jaxpaged.text.json_scanner import JsonScanner
from jaxpaged.text.text_reader import SPACE, Malformed, Steps, TextReader

type Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments, by name


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(eq=False)
class Calls:
    """Collects the parts of an answer. Owned by one parser.

    A call is told once its name and the beginning of its arguments are known. Space round calls is
    dropped.
    """

    tools: Tools
    parallel: bool = True  # else only the first call counts
    new_id: Callable[[], str] = new_call_id
    is_told: bool = False  # of the present call
    num_broken: int = 0  # texts that began a call and departed from its format
    _name: str | None = None
    _held: str = ""  # arguments that came before the name
    _is_whole: bool = False  # the arguments have ended
    _index: int = 0  # of the present or next call
    _parts: list[AnswerPart] = field(default_factory=list[AnswerPart])
    _space: str = ""  # after words, until it is known what follows
    _is_after_call: bool = False

    @property
    def num_ended(self) -> int:
        return self._index

    def take_parts(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip(SPACE)
        words = text.rstrip(SPACE)
        self._space = text[len(words) :]
        if words:
            self._is_after_call = False
            self._parts.append(Content(words))

    def finish(self) -> None:
        """The text has ended: the space after its last words belongs to them."""
        if self._space:
            self._parts.append(Content(self._space))
            self._space = ""

    def begin(self) -> None:
        self.is_told = self._is_whole = False
        self._name, self._held = None, ""

    def name(self, name: str) -> None:
        """The present call's tool; a name that comes twice or is empty is malformed."""
        if self._name is not None or not name:
            raise Malformed
        self._name = name
        if self._held:
            self.arguments("")

    def arguments(self, text: str) -> None:
        """More of the arguments, which must be JSON so far."""
        self._held += text
        if self._name is None or not self._held:
            return
        if not self.is_told:
            self._tell(CallStart(self._index, self.new_id(), self._name))
            self.is_told, self._is_after_call, self._space = True, True, ""
        self._tell(CallArguments(self._index, self._held))
        self._held = ""

    def arguments_end(self) -> None:
        self._is_whole = True

    def end(self) -> None:
        """The present call is whole; one without arguments has none to give.

        Raises:
            Malformed: nothing has named a tool.
        """
        if self._name is None:
            raise Malformed
        if not self.is_told:
            self.arguments("{}")
        self._index += 1

    def breaks_off(self, *, is_cut: bool) -> bool:
        """The text departs from the format: True if what it has of a call stands all the same."""
        if self._is_whole and self._name is not None:
            self.end()
            return True
        if self.is_told:
            self._index += 1
            self.num_broken += not is_cut
        return self.is_told

    def _tell(self, part: AnswerPart) -> None:
        if self.parallel or not self._index:
            self._parts.append(part)


def attempt(reader: TextReader, calls: Calls, reading: Steps[None], opening: str) -> Steps[bool]:
    """Read one call from the reader's mark; False where none was, and then `opening`, the text
    just before the mark, is content and the reader is at the mark again.
    """
    calls.begin()
    try:
        yield from reading
        calls.end()
    except Malformed:
        is_cut = reader.is_at_end  # which is no departure
        if not calls.breaks_off(is_cut=is_cut):
            calls.num_broken += bool(opening) and not is_cut
            reader.rewind()
            calls.content(opening)
            return False
    reader.unmark()
    return True


def read_list(
    reader: TextReader, calls: Calls, item: Callable[[TextReader, Calls], Steps[None]]
) -> Steps[None]:
    """`[item, item, ...]`, each a call; what comes where one should and is none is content."""
    opening = "["
    reader.mark()
    while (yield from attempt(reader, calls, _after(reader, calls, opening, item), "")):
        reader.mark()
        opening = ","
    if calls.num_ended:
        yield from reader.skip()
        yield from reader.take_if("]")
    yield from reader.until((), calls.content)


def _after(
    reader: TextReader,
    calls: Calls,
    opening: str,
    item: Callable[[TextReader, Calls], Steps[None]],
) -> Steps[None]:
    yield from reader.expect(opening)
    yield from item(reader, calls)


def json_call(reader: TextReader, calls: Calls, *, known_only: bool = False) -> Steps[None]:
    """An object with a name and arguments (or parameters), in any order.

    With `known_only` another name than a tool's makes it no call.
    """
    yield from reader.expect("{")
    yield from reader.skip()
    while (yield from reader.peek()) != "}":
        key = yield from reader.string()
        yield from reader.expect(":")
        if key == "name":
            name = yield from reader.string()
            if known_only and name not in calls.tools:
                raise Malformed
            calls.name(name)
        elif key in ("arguments", "parameters"):
            yield from json_arguments(reader, calls)
        else:
            yield from reader.json(JsonScanner(), lambda text: None)
        yield from reader.skip()
        if not (yield from reader.take_if(",")):
            break
        yield from reader.skip()
    yield from reader.expect("}")


def json_arguments(reader: TextReader, calls: Calls) -> Steps[None]:
    """An object, or one written as a string, or null, which is an empty one."""
    yield from reader.skip()
    first = yield from reader.peek()
    if first == "{":
        yield from _streamed(reader, calls)
    elif first == '"':
        calls.arguments(checked_object((yield from reader.string())))
    else:
        pieces: list[str] = []
        yield from reader.json(JsonScanner(), pieces.append)
        if "".join(pieces) != "null":
            raise Malformed
        calls.arguments("{}")
    calls.arguments_end()


def _streamed(reader: TextReader, calls: Calls) -> Steps[None]:
    """An object as it comes, once its first value has begun."""
    scanner, early = JsonScanner(), list[str]()

    def pass_on(text: str) -> None:
        early.append(text)
        if scanner.has_value or scanner.is_complete:
            calls.arguments("".join(early))
            early.clear()

    yield from reader.json(scanner, pass_on)


def checked_object(text: str) -> str:
    """`text` if it is a JSON object and nothing else; an empty text is an empty object.

    Raises:
        Malformed: it is not.
    """
    text = text.strip(SPACE) or "{}"
    scanner = JsonScanner()
    passed, end = scanner.take(text)
    if not (text.startswith("{") and scanner.is_complete and end == len(text)):
        raise Malformed
    return passed
