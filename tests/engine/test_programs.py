"""Programs come from processes, from disk or from here: the answers are the same."""

import asyncio
import itertools
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.core.buckets import Bucket, default_ladder
from jaxpaged.core.params import SamplingParams
from jaxpaged.engine import compile_clock, lowering, program_source, programs, starting
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.executables import ExecutableStore, default_cache_dir, programs_identity
from jaxpaged.engine.inbox import Inbox
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.program_source import Program
from jaxpaged.engine.starting import cache_folder, lowering_early
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
    processes = lowering.LoweringProcesses(1)
    processes.prepare(config_from_keywords(model="R"))
    processes.tell({})
    assert [processes.lower("forward"), processes.lower("sample")] == [None, None]
    processes.close()


def test_where_one_process_cannot_start_none_stays(monkeypatch):
    start, started = lowering._start, []

    def start_two(environment):
        if len(started) == 2:
            raise BlockingIOError("no more processes")
        started.append(start(environment))
        return started[-1]

    monkeypatch.setattr(lowering, "_start", start_two)
    with pytest.raises(BlockingIOError):
        lowering.LoweringProcesses(3)
    assert all(child.poll() is not None for child in started)


def test_processes_start_before_the_device_where_no_program_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(lowering, "CHILD", "jaxpaged.engine.no_such_module")
    config = config_from_keywords(model="R", compile_cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(starting, "count_gpus", lambda: 0)
    with lowering_early(config, is_wanted=True) as early:
        assert early is None
    monkeypatch.setattr(starting, "count_gpus", lambda: 1)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "default_backend", None)  # would open the device
    with lowering_early(config, is_wanted=True) as early:
        assert early is not None
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "one.jaxexe").touch()
    with lowering_early(config, is_wanted=True) as early:
        assert early is None


def test_a_program_asks_for_no_option_that_xla_does_not_have(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked = program_source._common_options.__wrapped__
    assert asked() == {program_source.FUSION_SEARCH: False}
    monkeypatch.setattr(program_source, "FUSION_SEARCH", "xla_gpu_no_such_option")
    assert asked() == {}


def test_what_takes_longest_starts_first_and_small_samplers_come_last(parts_r):
    source = parts_r.engine.runner._programs.source
    names = list(source.all_programs(default_ladder("gpu", 256, 8192)))
    assert names[:3] == [f"forward decode {n} {n} {n}" for n in (1, 8, 32)]
    kinds = [kind for kind, _ in itertools.groupby(" ".join(name.split()[:2]) for name in names)]
    assert kinds[:3] == ["forward decode", "sample full", "sample scored"]
    assert kinds[3:7] == ["forward decode", "forward mixed", "sample masked", "sample sampled"]
    assert len([name for name in names if name.startswith(("forward", "sample"))]) == 65


def test_results_of_cublas_are_not_checked_while_it_is_timed(parts_r, monkeypatch):
    source = parts_r.engine.runner._programs.source
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    few, many = (source.forward(Bucket("decode", "greedy", n, n)).options for n in (32, 64))
    assert few == {"xla_gpu_enable_triton_gemm": True}
    assert many == {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 2}


def test_a_second_start_compiles_nothing(model_folder, usual, tmp_path):
    first = start(model_folder, tmp_path / "cache")
    assert answers(first) == usual
    second = start(model_folder, tmp_path / "cache")
    assert answers(second) == usual
    before, after = first.parts.engine.runner, second.parts.engine.runner
    assert (before.num_loaded, after.num_compilations) == (0, 0)
    assert after.num_loaded == before.num_compilations


def test_what_jax_keeps_itself_is_not_kept_again_on_a_cpu(tmp_path):
    config = config_from_keywords(model="m", compile_cache_dir=str(tmp_path))
    assert cache_folder(config) == tmp_path
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        assert cache_folder(config) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


async def test_compiling_is_progress_until_it_takes_too_long(model_folder, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def compile_for_ever(*_):
        begun.set()
        go.wait(20)
        raise MemoryError("enough")

    monkeypatch.setattr(Program, "compile", compile_for_ever)
    llm = AsyncLLM(engines.tiny_parts(model_folder / "R"))
    await llm.submit(PROMPTS[0], PARAMS, "one", Inbox(0))
    await asyncio.to_thread(begun.wait, 20)
    await asyncio.sleep(0.3)
    assert llm.seconds_without_progress < 0.2
    monkeypatch.setattr(compile_clock, "MOST_COMPILE_S", 0.1)
    assert llm.seconds_without_progress > 0.1
    go.set()
    llm.close()


@pytest.fixture
def store(tmp_path):
    """A store with one program in it."""
    store = ExecutableStore(tmp_path / "cache", "model, pool")
    store.save("double", jax.jit(lambda x: 2 * x).lower(jnp.float32(0)).compile())
    return store


def test_a_stored_program_computes_what_it_did(store):
    assert store.load("double")(jnp.float32(4)) == 8
    assert store.load("half") is None


def test_a_program_of_another_pool_is_not_loaded(store):
    assert ExecutableStore(store.folder, "model, other pool").load("double") is None


def test_programs_on_other_shapes_have_another_identity():
    params, slots = jnp.zeros(2), jnp.zeros((2, 8), jnp.int16)
    others = [(params, slots), (params, slots[:1]), (params.astype(jnp.bfloat16), slots)]
    assert len({programs_identity("model", *other) for other in others}) == 3


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_damaged_program_is_not_loaded(store, place):
    (file,) = store.folder.iterdir()
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert store.load("double") is None


def test_a_folder_that_others_may_write_is_not_read(store):
    store.folder.chmod(0o770)
    assert store.load("double") is None


def test_of_a_user_without_a_home_no_programs_are_kept(monkeypatch):
    def nobody(_uid):
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)  # as in a container with a number for its user
    assert default_cache_dir() is None
    assert cache_folder(config_from_keywords(model="none")) is None
