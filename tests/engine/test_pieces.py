"""Who waits for the end is told in pieces; what comes out is what a stream would have said."""

from dataclasses import replace

import pytest

from benchmarks.host_loop import make_llm
from jaxpaged.config.speculation import Speculation
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.engine.stream import PIECE
from jaxpaged.text.tokenizer import ids_only_tokenizer
from tests.support.engines import TinyEngine
from tests.support.models import byte_ids

WAITS = OutputKind.FINAL_ONLY
LIST = [*range(60, 110), 60, 61, 62]  # what S says anyhow
PLAIN = SamplingParams(max_tokens=90, temperature=0.0, detokenize=False, output_kind=WAITS)


def events_of(params, num_requests=1, num_tokens=90):
    """What each request is told, until it has so many tokens or has ended; and the engine."""
    llm = make_llm(num_requests, ids_only_tokenizer(), 100)
    engine, told = llm.parts.engine, {str(i): [] for i in range(num_requests)}
    for name in told:
        engine.add(llm.parts.inputs.request([1, 2, 3], params, request_id=name))
    while engine.has_work and engine.metrics.num_output_tokens < num_tokens * num_requests:
        for event in engine.step():
            told[event.request_id].append(event)
    return told, engine


def test_the_first_token_comes_at_once_and_then_bounded_pieces():
    told, _ = events_of(PLAIN, num_requests=3)
    for events in told.values():
        sizes = [len(event.token_ids) for event in events]
        assert (sizes[0], sum(sizes)) == (1, 90)
        assert max(sizes) <= PIECE
        assert len(sizes) <= 90 // PIECE + 3
        assert events[-1].cumulative_logprob == -90.0
    assert len({len(events[1].token_ids) for events in told.values()}) == 3  # not all in one step


def test_a_stream_and_who_wants_logprobs_hear_of_every_token():
    for params in (replace(PLAIN, output_kind=OutputKind.DELTA), replace(PLAIN, stop=["q"])):
        told, _ = events_of(params)
        assert [len(event.token_ids) for event in told["0"]] == [1] * 90


def test_an_aborted_answer_tells_what_it_has_got():
    told, engine = events_of(PLAIN, num_tokens=20)
    (last,) = engine.abort("0")
    assert [len(event.token_ids) for event in (*told["0"], last)] == [1, 19]
    assert (last.finish_reason, last.cumulative_logprob) == ("abort", -20.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6, "seed": 4, "n": 2},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"stop": ["rs"]},
        {"stop_token_ids": [byte_ids("v")[0]], "include_stop_str_in_output": True},
    ],
)
@pytest.mark.parametrize("guesses", [None, Speculation("ngram", 3, 4, 2)])
def test_the_whole_is_that_of_a_stream(parts_s, fields, guesses):
    params = SamplingParams(**{"max_tokens": 75, "temperature": 0.0, "ignore_eos": True} | fields)
    waited = TinyEngine(parts_s, speculation=guesses).generate([LIST], [params])[0]
    llm = TinyEngine(parts_s, speculation=guesses).llm
    jobs = [(None, llm.parts.inputs.request(LIST, params))]
    streamed = next(iter(llm.run(jobs, max_inflight=1)))
    assert waited.outputs == streamed.outputs
    assert waited.prompt_logprobs == streamed.prompt_logprobs
