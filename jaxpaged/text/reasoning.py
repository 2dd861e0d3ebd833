"""Reasoning in an answer's text: what stands between `<think>` and `</think>`."""

from jaxpaged.text.answer_parts import AnswerPart, Content, Reasoning, merged
from jaxpaged.text.text_reader import SPACE, Steps, TextReader

OPEN, CLOSE = "<think>", "</think>"


def begins_in_reasoning(parser: str, prompt: str) -> bool:
    """Whether an answer goes on with reasoning that its prompt has opened.

    The prompt tells where its template opens or closes the reasoning; where it says nothing,
    deepseek_r1 answers begin inside and qwen3 answers open it themselves.
    """
    if prompt.rstrip().endswith(OPEN):
        return True
    return parser == "deepseek_r1" and not closes_reasoning(prompt)


def closes_reasoning(prompt: str) -> bool:
    """The prompt ends behind reasoning: its answer has none."""
    return prompt.rstrip().endswith(CLOSE)


class ReasoningParser:
    """Splits one answer into reasoning and content; space round the marks belongs to neither.

    However the text is cut into pieces, the joined parts are the same.
    """

    def __init__(self, *, is_open: bool):
        self._reader = TextReader()
        self._parts: list[AnswerPart] = []
        self._space = ""
        self.is_open = is_open  # reasoning goes on
        self._steps = self._read()

    def push(self, text: str) -> list[AnswerPart]:
        """What more text makes certain."""
        self._reader.push(text)
        return self._advance()

    def finish(self) -> list[AnswerPart]:
        """The rest, where no more text will come."""
        self._reader.end()
        return self._advance()

    def _advance(self) -> list[AnswerPart]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return merged(parts)

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.mark()
        yield from reader.skip()
        opens = yield from reader.take_if(OPEN)
        if opens or self.is_open:
            self.is_open = True
            reader.unmark()
            yield from reader.skip()
            yield from reader.until((CLOSE,), self._think)
            self.is_open = False
            yield from reader.skip()
        else:
            reader.rewind()
        yield from reader.until((), lambda text: self._parts.append(Content(text)))

    def _think(self, text: str) -> None:
        """Reasoning, without the space at its end."""
        text = self._space + text
        words = text.rstrip(SPACE)
        self._space = text[len(words) :]
        self._parts.append(Reasoning(words))
