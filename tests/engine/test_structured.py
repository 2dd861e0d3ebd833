"""Answers of a random model held to grammars, through scheduler, batch builder and sampler."""

import json
import random
from typing import Any

import pytest

from jaxpaged import SamplingParams, StructuredOutputsParams
from jaxpaged.engine import wire
from jaxpaged.errors import RequestError
from tests.support.engines import TinyEngine
from tests.support.models import EOS, byte_ids
from tests.support.schemas import check_json, random_schema
from tests.support.tangled_schemas import tangled_schema

PROMPT = byte_ids("Answer: ")


@pytest.fixture
def tiny(parts_r) -> TinyEngine:
    return TinyEngine(parts_r)


def held_to(schema=None, *, seed=0, max_tokens=60, **fields) -> SamplingParams:
    outputs = {
        name: fields.pop(name)
        for name in ("regex", "choice", "grammar", "json_object")
        if name in fields
    }
    structured = StructuredOutputsParams(json=schema, **outputs)
    return SamplingParams(structured_outputs=structured, seed=seed, max_tokens=max_tokens, **fields)


def answers(tiny: TinyEngine, params: list[SamplingParams]):
    return [out.outputs for out in tiny.generate([PROMPT] * len(params), params)]


def needs(tiny: TinyEngine, schema: Any) -> int:
    """The tokens of the shortest answer."""
    shortest = tiny.parts.inputs.grammars.compile(StructuredOutputsParams(json=schema)).shortest
    assert shortest is not None
    return shortest


def random_jobs(tiny: TinyEngine, seeds) -> list[tuple[dict, SamplingParams]]:
    jobs = []
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng, depth=2)
        max_tokens = needs(tiny, schema) + rng.choice([0, 0, 1, 3, 30])
        jobs.append((schema, held_to(schema, seed=seed, max_tokens=max_tokens)))
    return jobs


def check(schema, answer) -> None:
    assert answer.finish_reason == "stop", (schema, answer)
    check_json(answer.text, schema)


def test_random_schemas_are_met_at_any_budget_that_suffices(tiny):
    jobs = random_jobs(tiny, range(10))
    for (schema, _), (answer,) in zip(jobs, answers(tiny, [p for _, p in jobs]), strict=True):
        check(schema, answer)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 25))
def test_two_hundred_tangled_schemas_are_met_at_every_budget(tiny, first):
    jobs = []
    for seed in range(first, first + 25):
        schema = tangled_schema(random.Random(seed))
        try:
            shortest = needs(tiny, schema)
        except RequestError:  # not served, or nothing fits it
            continue
        if shortest < 200:  # the model has 256 positions
            jobs += [
                (schema, held_to(schema, seed=seed, max_tokens=shortest + i)) for i in range(7)
            ]
    assert len(jobs) > 100
    for (schema, _), (answer,) in zip(jobs, answers(tiny, [p for _, p in jobs]), strict=True):
        check(schema, answer)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


def test_preemption_and_steps_in_flight_change_no_answer(parts_r):
    params = [held_to(SCHEMA, seed=i, max_tokens=50) for i in range(4)]
    calm = answers(TinyEngine(parts_r, max_in_flight=1), params)
    small = TinyEngine(parts_r, num_pages=9)
    crowded = answers(small, params)
    assert small.scheduler.num_preemptions > 0
    for before, after in zip(calm, crowded, strict=True):
        assert before[0].token_ids == after[0].token_ids
        check(SCHEMA, after[0])


def test_neighbours_without_a_grammar_keep_their_answers(tiny):
    plain = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
    alone = answers(tiny, [plain])[0][0]
    mixed = answers(tiny, [plain, held_to(SCHEMA), held_to(choice=["yes", "no"])])
    assert mixed[0][0].token_ids == alone.token_ids
    check(SCHEMA, mixed[1][0])
    assert mixed[2][0].text in ("yes", "no")


def test_each_of_n_answers_follows_the_grammar_by_itself(tiny):
    (outputs,) = answers(tiny, [held_to(SCHEMA, n=4, seed=3)])
    for answer in outputs:
        check(SCHEMA, answer)
    assert len({answer.text for answer in outputs}) > 1
    (again,) = answers(tiny, [held_to(SCHEMA, n=4, seed=3)])
    assert [a.text for a in again] == [a.text for a in outputs]


def test_regex_grammar_and_greedy(tiny):
    params = [
        held_to(regex=r"[0-9]{3}-(ab|c)+", max_tokens=12, temperature=0),
        held_to(grammar='start: "x" /[0-9]{4}/', max_tokens=12),
        held_to(json_object=True, max_tokens=30),
    ]
    (regex,), (lark,), (anything,) = answers(tiny, params)
    assert regex.text[:3].isdigit()
    assert regex.text[4:].replace("ab", "").replace("c", "") == ""
    assert lark.text[0] == "x"
    assert lark.text[1:].isdigit()
    assert isinstance(json.loads(anything.text), dict)


def test_no_end_of_text_before_min_tokens_or_when_it_is_ignored(tiny):
    params = [
        held_to(regex="a+", min_tokens=10, max_tokens=30),
        held_to(regex="a+", ignore_eos=True, max_tokens=30),
        held_to(regex="a{3}", min_tokens=10, max_tokens=30),  # nothing may follow
    ]
    (late,), (never,), (short,) = answers(tiny, params)
    assert len(late.text) >= 10
    assert (never.text, never.finish_reason) == ("a" * 30, "stop")
    assert (short.text, short.finish_reason) == ("aaa", "stop")


def test_end_of_text_is_only_sampled_where_the_grammar_allows_it(tiny):
    bias = {EOS: 100.0}
    (answer,), (word,) = answers(
        tiny, [held_to(SCHEMA, logit_bias=bias), held_to(regex="ab*", logit_bias=bias)]
    )
    check(SCHEMA, answer)
    assert word.text == "a"


def test_stop_strings_and_logprobs_work_beside_a_grammar(tiny):
    params = [
        held_to(SCHEMA, stop=['"n"']),
        held_to(choice=["abc"], logprobs=2),
    ]
    (stopped,), (scored,) = answers(tiny, params)
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == '"n"'
    assert scored.text == "abc"
    assert len(scored.logprobs) == 3


def test_a_row_that_loses_its_grammar_fails_alone(tiny):
    params = [
        held_to(choice=["yes"], allowed_token_ids=byte_ids("no")),
        held_to(regex="ab", bad_words=["b"]),
        held_to(SCHEMA, seed=9),
    ]
    (masked,), (banned,), (fine,) = answers(tiny, params)
    assert masked.finish_reason == banned.finish_reason == "error"
    check(SCHEMA, fine)


def test_a_grammar_that_leads_nowhere_later_on_says_so_in_one_plain_line(tiny):
    (output,) = tiny.generate([PROMPT], [held_to(grammar='start: "a" x\nx: x')])
    assert output.outputs[0].finish_reason == "error"
    assert output.error == (
        "after 1 tokens of the answer the grammar lets none follow, its rules lead only back to "
        "themselves or to what nothing matches: correct it"
    )


def test_too_few_tokens_are_refused_with_the_number_that_is_needed(tiny):
    schema = {"type": "object", "properties": {"k": {"enum": ["abc"]}}, "required": ["k"]}
    needed = r"response_format or tool_choice allow takes 11 tokens"
    with pytest.raises(RequestError, match=needed) as caught:
        answers(tiny, [held_to(schema, max_tokens=10)])
    assert caught.value.param == "max_tokens"
    check(schema, answers(tiny, [held_to(schema, max_tokens=11)])[0][0])


def test_structured_outputs_reach_an_engine_in_another_process():
    params = held_to(SCHEMA)
    message = wire.frame(wire.Submit(1, "id", [1], params, 0, "", ""))
    (data,) = wire.Frames().feed(message)
    got = wire.to_engine.decode(data)
    assert isinstance(got, wire.Submit)
    assert got.params.structured_outputs == params.structured_outputs
