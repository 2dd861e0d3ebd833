"""Programs come from processes, from disk or from here: the answers are the same."""

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.engine import lowering, programs
from jaxpaged.engine.llm import LLM
from tests.support import engines

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "token_buckets": (32,)}
PROMPTS = [[5, 6, 7], [9] * 20]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=6)


def start(folder, cache="", **settings) -> LLM:
    settings = SIZES | {"batch_buckets": (2,), "compile_cache_dir": str(cache)} | settings
    return LLM.from_parts(engines.tiny_parts(folder / "R", **settings))


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def usual(model_folder):
    """What an engine answers that compiles everything itself, when first met."""
    return answers(start(model_folder))


@pytest.fixture
def in_processes(monkeypatch):
    """Lower everything in one child; the list fills with what it gave."""
    given: list[bytes | None] = []
    lower = lowering.LoweringProcesses.lower

    def spied(self, name):
        given.append(lower(self, name))
        return given[-1]

    monkeypatch.setattr(programs, "FEWEST_FOR_PROCESSES", 1)
    monkeypatch.setattr(programs, "_num_threads", lambda: 2)
    monkeypatch.setattr(lowering.LoweringProcesses, "lower", spied)
    return given


def test_programs_lowered_in_a_process_give_the_same_answers(model_folder, usual, in_processes):
    lowered = start(model_folder, warmup="all")
    assert in_processes
    assert None not in in_processes
    before = lowered.parts.engine.runner.num_compilations
    assert before == len(in_processes)
    assert answers(lowered) == usual
    assert lowered.parts.engine.runner.num_compilations == before


def test_a_process_that_ends_is_done_without(monkeypatch):
    monkeypatch.setattr(lowering, "CHILD", "jaxpaged.engine.no_such_module")
    processes = lowering.LoweringProcesses(1, {})
    assert [processes.lower("forward"), processes.lower("sample")] == [None, None]
    processes.close()


def test_a_second_start_compiles_nothing_but_what_was_damaged(model_folder, usual, tmp_path):
    cache = tmp_path / "cache"
    first = start(model_folder, cache, warmup="all").parts.engine.runner
    assert first.num_loaded == 0
    second = start(model_folder, cache, warmup="all").parts.engine.runner
    assert (second.num_compilations, second.num_loaded) == (0, first.num_compilations)

    file = min(cache.iterdir())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    third = start(model_folder, cache, warmup="all")
    assert third.parts.engine.runner.num_compilations == 1
    assert answers(third) == usual


def test_programs_of_another_pool_are_not_loaded(model_folder, tmp_path):
    start(model_folder, tmp_path / "cache", warmup="all")
    other = start(model_folder, tmp_path / "cache", num_gpu_blocks_override=40, warmup="all")
    assert other.parts.engine.runner.num_loaded == 0


def test_a_folder_that_others_may_write_is_not_read(model_folder, tmp_path):
    cache = tmp_path / "cache"
    start(model_folder, cache, warmup="all")
    cache.chmod(0o770)
    assert start(model_folder, cache, warmup="all").parts.engine.runner.num_loaded == 0
