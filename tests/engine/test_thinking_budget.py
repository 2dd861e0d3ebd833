"""`thinking_token_budget`: reasoning of a free answer ends after so many tokens."""

from dataclasses import replace

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.structured import ReasoningMarks
from jaxpaged.text.thinking_budget import ThinkingBudget
from tests.support.engines import TinyEngine
from tests.support.models import byte_ids

PROMPT, END = byte_ids("Answer: "), byte_ids("</think>")
FREE = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)


def limited(num: int, *, is_open: bool = True, **more) -> SamplingParams:
    return replace(FREE, reasoning=ReasoningMarks("<think>", "</think>", is_open, num), **more)


def ids(tiny: TinyEngine, prompts, params) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in tiny.generate(prompts, params)]


@pytest.fixture
def tiny(parts_r) -> TinyEngine:
    return TinyEngine(parts_r)


def test_the_closing_mark_is_forced_at_the_limit_and_neighbours_stay_the_same(tiny):
    (free,) = ids(tiny, [PROMPT], [FREE])
    limits = [0, 1, 7, 39]
    *held, beside = ids(tiny, [PROMPT] * 5, [*(limited(n) for n in limits), FREE])
    assert beside == free
    for limit, answer in zip(limits, held, strict=True):
        assert answer[:limit] == free[:limit]  # until then nothing is changed
        assert answer[limit : limit + len(END)] == END[: 40 - limit]
        assert len(answer) == 40
    goes_on = held[1][1 + len(END) :]
    assert goes_on != END * 5, "nothing is forced behind the mark"


def test_an_answer_that_opens_no_reasoning_or_closes_it_itself_is_left_alone(tiny):
    (free,) = ids(tiny, [PROMPT], [FREE])
    bias = {END[0]: 100.0}  # which opens no reasoning
    plain, unopened, biased, held = ids(
        tiny,
        [PROMPT] * 4,
        [
            FREE,
            limited(3, is_open=False),
            replace(FREE, logit_bias=bias),
            limited(3, is_open=False, logit_bias=bias),
        ],
    )
    assert plain == unopened == free
    assert held == biased


@pytest.mark.parametrize(
    ("text", "is_open", "ends", "forced"),
    [
        ("<think>ab", False, False, None),
        ("\n<think>abc", False, False, END[0]),
        ("<think>abc</", False, False, END[2]),
        ("<thix", False, True, None),
        ("a</think>", True, True, None),
        ("abc", True, False, END[0]),
    ],
)
def test_what_is_between_the_marks_counts(parts_r, text, is_open, ends, forced):
    marks = {"begin": "<think>", "end": "</think>"}
    budget = ThinkingBudget(parts_r.tokenizer, **marks, is_open=is_open, max_tokens=3)
    *first, last = byte_ids(text)
    if "</think>" in text:
        budget = ThinkingBudget(parts_r.tokenizer, **marks, is_open=is_open, max_tokens=30)
    assert not budget.ends_with(first)
    assert budget.ends_with([last]) == ends
    if not ends:
        assert budget.forced_id == forced
