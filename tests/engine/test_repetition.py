"""Answers that repeat themselves end there, however their tokens come."""

from dataclasses import replace

import pytest

from jaxpaged import RepetitionDetectionParams, SamplingParams
from jaxpaged.engine import wire
from tests.support.engines import TinyEngine
from tests.support.models import byte_ids
from tests.support.repetition import num_until_repetition

PROMPT = byte_ids("Say: ")
WANTED = RepetitionDetectionParams(max_pattern_size=5, min_pattern_size=2, min_count=3)
PLAIN = SamplingParams(max_tokens=120, ignore_eos=True, allowed_token_ids=byte_ids("ab"))


@pytest.fixture
def tiny(parts_r) -> TinyEngine:
    return TinyEngine(parts_r)


def answers(tiny: TinyEngine, params: list[SamplingParams]):
    return [out.outputs[0] for out in tiny.generate([PROMPT] * len(params), params)]


@pytest.mark.parametrize("min_tokens", [0, 40])
def test_an_answer_ends_with_the_token_that_repeats_it(tiny, min_tokens):
    plain = [replace(PLAIN, seed=seed) for seed in range(8)]
    wanted = [replace(one, repetition_detection=WANTED, min_tokens=min_tokens) for one in plain]
    found = answers(tiny, wanted)
    for told, whole in zip(found, answers(tiny, plain), strict=True):
        num = num_until_repetition(whole.token_ids, WANTED, min_tokens)
        assert list(told.token_ids) == list(whole.token_ids[:num])
        assert told.text == whole.text[:num]
        is_found = num is not None and num < len(whole.token_ids)
        want = ("repetition", "repetition_detected") if is_found else ("length", None)
        assert (told.finish_reason, told.stop_reason) == want
    assert sum(told.finish_reason == "repetition" for told in found) > 4


def test_a_half_character_at_the_end_is_told_and_a_limit_goes_before(tiny):
    melt = byte_ids("\U0001fae0")
    say = SamplingParams(allowed_token_ids=melt[:1], max_tokens=9, ignore_eos=True)
    looking = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    cut, limited, unlooked = answers(
        tiny,
        [
            replace(say, repetition_detection=looking),
            replace(say, repetition_detection=looking, max_tokens=3),
            replace(say, repetition_detection=RepetitionDetectionParams()),
        ],
    )
    assert (cut.finish_reason, len(cut.token_ids), len(cut.text)) == ("repetition", 3, 3)
    assert (limited.finish_reason, limited.stop_reason) == ("length", None)
    assert (unlooked.finish_reason, len(unlooked.token_ids)) == ("length", 9)


def test_what_to_look_for_reaches_an_engine_in_another_process():
    params = replace(PLAIN, repetition_detection=WANTED)
    (data,) = wire.Frames().feed(wire.frame(wire.Submit(1, "id", [1], params, 0, "", "")))
    got = wire.to_engine.decode(data)
    assert isinstance(got, wire.Submit)
    assert got.params.repetition_detection == WANTED
