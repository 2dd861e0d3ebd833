"""What an answer is made of, as its text is read: reasoning, content, calls of tools."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """Thoughts before the answer."""

    text: str


class Content(NamedTuple):
    """Words for the user."""

    text: str


class CallStart(NamedTuple):
    """A call begins: its place among the answer's calls, its id, and the tool."""

    place: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which are JSON text."""

    place: int
    text: str


type AnswerPart = Reasoning | Content | CallStart | CallArguments


def merged(parts: list[AnswerPart]) -> list[AnswerPart]:
    """The same with neighbours of one kind joined, and empty ones left out."""
    joined: list[AnswerPart] = []
    for part in parts:
        before = joined[-1] if joined else None
        match before, part:
            case Reasoning(first), Reasoning(second):
                joined[-1] = Reasoning(first + second)
            case Content(first), Content(second):
                joined[-1] = Content(first + second)
            case CallArguments(place, first), CallArguments(same, second) if place == same:
                joined[-1] = CallArguments(place, first + second)
            case _, (Reasoning("") | Content("") | CallArguments(_, "")):
                pass
            case _:
                joined.append(part)
    return joined
