"""Who waits for the end is told in pieces; what comes out is what a stream would have said."""

from dataclasses import replace

import pytest

from benchmarks.host_loop import make_llm
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.engine.stream import PIECE
from jaxpaged.text.tokenizer import ids_only_tokenizer, load_tokenizer
from tests.support.models import EOS, VOCAB, write_tokenizer
from tests.support.scripted_engine import ScriptedDevice

WAITS = OutputKind.FINAL_ONLY
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


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 33}, {"include_stop_str": True}])
def test_the_whole_is_that_of_a_stream(tmp_path, fields):
    """Told in pieces by `generate`; token by token by `run`. The answer ends by itself."""
    write_tokenizer(tmp_path)
    tokenizer, device = load_tokenizer(tmp_path), ScriptedDevice()
    device.script = "".join(chr(97 + i % 26) for i in range(70)) + "\u00e9"
    llm = make_llm(2, tokenizer, VOCAB)
    steps = llm.parts.engine.steps
    steps.runner, steps.on_step = device, device.on_step
    options = {"max_tokens": 90, "stop_token_ids": [EOS]} | fields
    shown = options.pop("include_stop_str", False)
    params = SamplingParams(temperature=0.0, include_stop_str_in_output=shown, **options)
    (waited,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    (streamed,) = llm.run([(None, llm.parts.inputs.request([1, 2, 3], params))], max_inflight=1)
    assert waited.outputs == streamed.outputs
    assert waited.outputs[0].text.startswith(device.script[:33])
