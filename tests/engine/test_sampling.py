"""Sampling on model S: 0.516 for the next token, 0.190 for the one after, the rest alike."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams, StructuredOutputsParams
from jaxpaged.errors import EngineStopped, InvariantError, RequestError
from tests.support.engines import TinyEngine, poison_pages
from tests.support.models import EOS, byte_ids

ABC, D, E, F, X = "ABC", *byte_ids("DEFX")


@pytest.fixture(scope="module")
def llm(parts_s):
    return LLM.from_parts(parts_s)


def texts(llm, prompt=ABC, **params):
    output = llm.generate(prompt, SamplingParams(**{"temperature": 0} | params), use_tqdm=False)[0]
    return [answer.text for answer in output.outputs]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_tokens": 4}, "DEFG"),
        ({"max_tokens": 8, "stop": ["FG"]}, "DE"),
        ({"max_tokens": 8, "stop": ["FG"], "include_stop_str_in_output": True}, "DEFG"),
        ({"max_tokens": 8, "min_tokens": 5, "stop": ["E"]}, "DEFGHIJK"),
        ({"max_tokens": 8, "stop_token_ids": [F]}, "DE"),
        ({"max_tokens": 3, "stop_token_ids": [D], "min_tokens": 3}, "EFG"),
        ({"max_tokens": 1, "logit_bias": {D: -100}}, "E"),
        ({"max_tokens": 2, "allowed_token_ids": [E, F]}, "EF"),
        ({"max_tokens": 1, "bad_words": ["D"], "logit_bias": {D: 100}}, "E"),
        ({"max_tokens": 3, "bad_words": ["DE"]}, "DFG"),
        ({"max_tokens": 1, "prompt": "D" + "A" * 40 + "C", "repetition_penalty": 1.5}, "E"),
    ],
)
def test_each_field_has_its_effect(llm, params, text):
    assert texts(llm, **{"prompt": ABC} | params) == [text]


def test_logprobs_are_those_of_the_model(llm):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=1)
    output = llm.generate(ABC, params, use_tqdm=False)[0]
    first = output.outputs[0].logprobs[0]
    assert first[D].logprob == pytest.approx(-0.6611, abs=1e-3)
    assert first[E].logprob == pytest.approx(-1.6609, abs=1e-3)
    assert (first[D].rank, first[E].rank, first[D].decoded_token) == (1, 2, "D")
    assert output.prompt_logprobs[0] is None
    scored = [
        place[token].logprob
        for place, token in zip(output.prompt_logprobs[1:], byte_ids("BC"), strict=True)
    ]
    assert scored == pytest.approx([-0.6611, -0.6611], abs=1e-3)
    assert output.outputs[0].cumulative_logprob == pytest.approx(-1.3222, abs=1e-3)


def test_named_tokens_are_told_instead_of_the_likeliest(llm):
    plain = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    named = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[511, E])
    scored = dataclasses.replace(named, prompt_logprobs=0)
    outputs = llm.generate([ABC] * 3, [named, plain, scored], use_tqdm=False)
    alone, neighbour, with_prompt = [output.outputs[0].logprobs for output in outputs]
    assert [set(place) for place in neighbour] == [{D}, {E}]
    for places in (alone, with_prompt):
        assert [set(place) for place in places] == [{D, E, 511}, {E, 511}]
        told = [places[0][token].logprob for token in (D, E, 511)]
        assert told == pytest.approx([-0.6611, -1.6609, -7.4594], abs=1e-3)
        assert (places[0][D].rank, places[0][E].rank) == (1, None)
        assert places[1][E].logprob == pytest.approx(-0.6611, abs=1e-3)


@pytest.mark.parametrize(
    ("params", "low", "high"),
    [
        ({"temperature": 1.0}, 0.37, 0.66),
        ({"temperature": 1.0, "top_k": -1}, 0.37, 0.66),
        ({"temperature": 1.0, "top_k": 10**6}, 0.37, 0.66),
        ({"temperature": 1.0, "min_p": 0.01}, 0.61, 0.86),
        ({"temperature": 1.0, "top_k": 2}, 0.61, 0.86),
        ({"temperature": 1.0, "top_p": 0.6}, 0.61, 0.86),
        ({"temperature": 1.0, "top_k": 1}, 1.0, 1.0),
    ],
)
def test_the_share_of_the_likeliest_token(llm, params, low, high):
    many = [SamplingParams(max_tokens=1, seed=i, **params) for i in range(200)]
    outputs = llm.generate([ABC] * 200, many, use_tqdm=False)
    share = sum(output.outputs[0].text == "D" for output in outputs) / 200
    assert low <= share <= high


def test_min_p_is_measured_after_the_temperature(llm):
    many = [SamplingParams(max_tokens=1, seed=i, temperature=2.0, min_p=0.01) for i in range(200)]
    outputs = llm.generate([ABC] * 200, many, use_tqdm=False)
    assert sum(output.outputs[0].text in ("D", "E") for output in outputs) / 200 < 0.17


def test_choices_of_one_seed_differ_and_repeat(llm):
    first, second = (texts(llm, n=8, seed=7, temperature=1.0, max_tokens=6) for _ in range(2))
    assert first == second
    assert len(set(first)) > 1


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(llm):
    mine = SamplingParams(temperature=1.0, seed=3, max_tokens=8)
    alone = llm.generate(ABC, mine, use_tqdm=False)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.0, seed=i, max_tokens=8) for i in (90, 91, 92)]
    crowd = llm.generate([ABC] * 4, [*others, mine], use_tqdm=False)
    assert crowd[3].outputs[0].token_ids == alone


def test_end_of_text_ends_an_answer_unless_it_is_ignored(llm):
    prompt = [EOS - 2, EOS - 1]
    for ignores, reason, count in ((False, "stop", 1), (True, "length", 3)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=ignores)
        answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert (answer.finish_reason, len(answer.token_ids)) == (reason, count)


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ({"prompt_token_ids": []}, {}, "empty"),
        ([512], {}, "512"),
        ([-1], {}, "-1"),
        ([True], {}, "True"),
        ("A" * 255, {"max_tokens": 2}, "255"),
        (ABC, {"stop_token_ids": [512]}, "stop_token_ids"),
        (ABC, {"logit_bias": {512: 1.0}}, "logit_bias"),
        (ABC, {"allowed_token_ids": [-1]}, "allowed_token_ids"),
        (ABC, {"logits_processors": ["none such"]}, "none such"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(llm, prompt, params, says):
    with pytest.raises(RequestError, match=says):
        llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    assert texts(llm, max_tokens=2) == ["DE"]


def test_a_row_whose_logits_break_fails_alone(parts_s):
    engine = TinyEngine(parts_s)
    runner, read, broken = parts_s.engine.runner, parts_s.engine.runner.read, []

    def read_with_fault(pending):
        result = read(pending)
        if not broken:
            broken.append(True)
            result.is_finite[0] = False
        return result

    runner.read = read_with_fault
    try:
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = engine.generate([byte_ids("ABC"), byte_ids("MNO")], [params, params])
    finally:
        runner.read = read
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "finite" in outputs[0].error
    assert outputs[1].outputs[0].text == "PQRS"
    assert engine.engine.metrics.registry.get_sample_value(
        "vllm:corrupted_requests_total", {"model_name": "tiny", "engine": "0"}
    )


EMPTIED = [  # what is asked, what comes before no token is left, what is at fault
    ({"allowed_token_ids": [X], "bad_words": ["X"]}, "", "allowed_token_ids and bad_words"),
    ({"allowed_token_ids": [X], "bad_words": ["XXX"]}, "XX", "allowed_token_ids and bad_words"),
    ({"allowed_token_ids": [EOS], "min_tokens": 2}, "", "allowed_token_ids and min_tokens"),
    (
        {"structured_outputs": StructuredOutputsParams(regex="[AB]{3}"), "bad_words": ["A", "B"]},
        "",
        "structured_outputs and bad_words",
    ),
]


@pytest.mark.parametrize(
    "more", [{"temperature": 0}, {"seed": 1}, {"temperature": 0, "logprobs": 1}]
)
@pytest.mark.parametrize(("asked", "before", "at_fault"), EMPTIED)
def test_a_row_that_excludes_every_token_fails_alone(parts_s, asked, before, at_fault, more):
    params = [SamplingParams(max_tokens=4, **asked, **more), SamplingParams(temperature=0)]
    engine = TinyEngine(parts_s)
    emptied, other = engine.generate([byte_ids("ABC"), byte_ids("MNO")], params)
    answer = emptied.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("error", at_fault.split()[0])
    assert emptied.error == f"{at_fault} leave no token to sample"
    assert answer.text == before
    assert other.outputs[0].text == "PQRSTUVWXYZ[\\]^_"


def test_a_prompt_in_chunks_is_not_judged_by_what_it_would_sample_within(parts_s):
    engine = TinyEngine(parts_s, token_budget=4)
    asked = {"allowed_token_ids": [X], "bad_words": ["DX"], "max_tokens": 2}
    params = SamplingParams(temperature=0, **asked)
    (output,) = engine.generate([byte_ids("ABCDEFGH")], [params])
    assert (output.outputs[0].text, output.error) == ("XX", None)


def test_processors_attention_and_weights_can_be_replaced(model_folder):
    calls = []

    def no_attention(q, pages, batch, *, spec):
        calls.append(spec)
        return jnp.zeros_like(q)

    def favour_z(logits, state):
        assert state.output_counts.shape == logits.shape
        return logits.at[:, byte_ids("Z")[0]].add(100.0)

    with LLM(
        model_folder / "S",
        attention=no_attention,
        logits_processors={"favour z": favour_z},
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
        compile_cache_dir="",
    ) as llm:
        assert texts(llm, max_tokens=3) == ["DEF"]  # S does not look back
        assert calls
        assert texts(llm, max_tokens=2, logits_processors=["favour z"]) == ["ZZ"]
        params = llm.parts.engine.runner.params
        llm.update_params(params | {"lm_head": {k: -v for k, v in params["lm_head"].items()}})
        assert texts(llm, max_tokens=1) != ["D"]
        with pytest.raises(InvariantError, match="lm_head"):
            llm.update_params(
                params | {"lm_head": {k: v[:4] for k, v in params["lm_head"].items()}}
            )
        with pytest.raises(InvariantError, match=r"'table'.* is missing"):
            llm.update_params({})
        with pytest.raises(InvariantError, match=r"'other'.* is none of this model's"):
            llm.update_params(params | {"other": params["lm_head"]})
        for messages in ("ABC", [5], ["ABC"]):
            with pytest.raises(RequestError, match="a message is"):
                llm.chat(messages)
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate(ABC)


def test_poisoned_pages_are_really_poisoned(parts_s):
    poison_pages(parts_s.engine.runner)
    pages = parts_s.engine.runner.state.kv_pages[0]
    assert np.isnan(np.asarray(pages.k)).all()
