"""Reasoning is told apart from content, whatever the pieces."""

import pytest

from jaxpaged.text.answer_parts import Content, Reasoning, merged
from jaxpaged.text.reasoning import ReasoningParser, begins_in_reasoning


def split(pieces, *, is_open):
    parser = ReasoningParser(is_open=is_open)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts = merged(parts + parser.finish())
    return tuple(
        "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (Reasoning, Content)
    )


@pytest.mark.parametrize(
    ("is_open", "text", "want"),
    [
        (False, "<think>\nHm. \n\nSo\n</think>\n\nYes.\n", ("Hm. \n\nSo", "Yes.\n")),
        (True, "Hm.</think>Yes.", ("Hm.", "Yes.")),
        (True, "<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
        (True, "cut by the limit </thi", ("cut by the limit </thi", "")),
        (False, " No thoughts. <think>", ("", " No thoughts. <think>")),
        (False, "<thin", ("", "<thin")),
        (False, "<think>\n\n</think>\n\nYes", ("", "Yes")),
        (True, "a</think>b</think>c", ("a", "b</think>c")),
        (True, "", ("", "")),
    ],
)
def test_reasoning_and_content_are_told_apart(is_open, text, want):
    assert split([text], is_open=is_open) == want
    assert split(list(text), is_open=is_open) == want
    for place in range(len(text)):
        assert split([text[:place], text[place:]], is_open=is_open) == want


@pytest.mark.parametrize(
    ("parser", "prompt", "want"),
    [
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|><think>\n", True),
        ("deepseek_r1", "<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<think>\n\n</think>\n\n", False),
    ],
)
def test_the_prompt_tells_where_an_answer_begins(parser, prompt, want):
    assert begins_in_reasoning(parser, prompt) is want
