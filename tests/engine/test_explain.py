from benchmarks.host_loop import make_llm
from jaxpaged.core.params import SamplingParams
from jaxpaged.engine import explain
from jaxpaged.text.tokenizer import ids_only_tokenizer


def generate(llm, num_prompts=1, **fields):
    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False, **fields
    )
    prompts = [[i, 2, 3, 4] * 10 for i in range(num_prompts)]
    return [out.request_id for out in llm.generate(prompts, params, use_tqdm=False)]


def test_a_request_that_asks_is_explained_after_its_end():
    llm = make_llm(2, ids_only_tokenizer(), 100)
    first, _, last = generate(llm, 3, explain=True)
    (answer,) = llm.explanation(first)["answers"]
    assert answer["state"] == "finished"
    assert answer["tokens_per_step"] == [(40, 1), (1, 4)]
    assert answer["plans_waited"] == {}
    assert answer["first_missed_page"] == 0
    assert answer["completion_tokens"] == 5
    seconds = answer["seconds"]
    parts = seconds["queue"] + seconds["prefill"] + seconds["decode"]
    assert abs(parts - seconds["total"]) < 1e-6
    (answer,) = llm.explanation(last)["answers"]
    assert answer["plans_waited"]["slots"] >= 4
    assert not llm.parts.engine.scheduler.traces


def test_what_did_not_ask_is_explained_only_while_it_runs():
    llm = make_llm(1, ids_only_tokenizer(), 100)
    engine, inputs = llm.parts.engine, llm.parts.inputs
    params = SamplingParams(temperature=0.0, max_tokens=3, detokenize=False)
    for name in ("a", "b"):
        engine.add(inputs.request([1, 2, 3], params, request_id=name))
    engine.step()
    running, waiting = (engine.explanation(name)["answers"][0] for name in "ab")
    assert (running["state"], running["waits_for"]) == ("running", None)
    assert (waiting["state"], waiting["waits_for"]) == ("waiting", "slots")
    assert waiting["seconds"]["prefill"] is None
    assert "tokens_per_step" not in running
    while engine.has_work:
        engine.step()
    assert engine.explanation("a") is None


def test_every_answer_of_a_request_is_explained_and_an_aborted_one_too():
    llm = make_llm(2, ids_only_tokenizer(), 100)
    (request_id,) = generate(llm, explain=True, n=2)
    assert [a["index"] for a in llm.explanation(request_id)["answers"]] == [0, 1]
    engine, inputs = llm.parts.engine, llm.parts.inputs
    params = SamplingParams(max_tokens=9, detokenize=False, explain=True)
    engine.add(inputs.request([1, 2], params, request_id="gone"))
    engine.step()
    assert [event.finish_reason for event in engine.abort("gone")] == ["abort"]
    assert engine.abort("gone") == []
    assert engine.explanation("gone")["answers"][0]["finish_reason"] == "abort"
    assert not engine.scheduler.traces


def test_only_the_last_explanations_are_kept(monkeypatch):
    monkeypatch.setattr(explain, "MAX_KEPT", 2)
    llm = make_llm(2, ids_only_tokenizer(), 100)
    ids = generate(llm, 4, explain=True)
    assert [llm.explanation(request_id) is None for request_id in ids] == [True, True, False, False]
