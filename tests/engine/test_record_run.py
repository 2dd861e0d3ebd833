from benchmarks.host_loop import make_llm
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.recording import RecordedScheduler, replay
from jaxpaged.text.tokenizer import ids_only_tokenizer


def test_a_run_of_the_engine_is_planned_the_same_again(tmp_path):
    """Stops, an abort and a cache reset that come from the engine and its callers."""
    file, llm = tmp_path / "run.jsonl", make_llm(3, ids_only_tokenizer(), 100)
    engine, inputs = llm.parts.engine, llm.parts.inputs
    engine.scheduler = RecordedScheduler(engine.scheduler, file)
    params = SamplingParams(temperature=0.0, max_tokens=9, detokenize=False)
    stopped = SamplingParams(temperature=0.0, stop_token_ids=[7], detokenize=False, explain=True)
    llm.generate([[5] * 40, [5] * 45, [6] * 33, [5, 6]], [params, stopped] * 2, use_tqdm=False)
    llm.reset_prefix_cache()
    engine.add(inputs.request([5] * 40, params, request_id="gone"))
    engine.step()
    engine.abort("gone")
    llm.generate([[5] * 40], params, use_tqdm=False)
    found = replay(file)
    assert found.mismatch is None
    assert found.num_plans > 15
    kinds = [line.split('"')[3] for line in file.read_text().splitlines()]
    assert kinds.count("add") == 6
    assert {"finish", "reset_prefix_cache", "commit"} <= set(kinds)
