"""Several engines' processes as one: who gets what, and what a death or a hang costs."""

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.config.settings import EngineConfig, ModelSettings, ParallelSettings
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.request import Pin
from jaxpaged.engine.inbox import Inbox
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.picture import NULL
from jaxpaged.engine.replica import ReplicaPolicy
from jaxpaged.engine.replica_metrics import merge_texts
from jaxpaged.engine.replicas import ReplicaSet
from jaxpaged.errors import ConfigError, EngineStopped, RequestError
from tests.support import engines
from tests.support.models import byte_ids, write_model

WORKER = "tests.support.thin_worker"
FOREVER = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, output_kind=OutputKind.DELTA)
NO_RESTARTS = ReplicaPolicy(2.0, restart_delays_s=())
RESTARTS = ReplicaPolicy(2.0, restart_delays_s=(0.05, 0.05))


@pytest.fixture
async def replicas(tmp_path: Path):
    """Start two replicas over the successor model; keywords are the faults of the thin worker."""
    made: list[ReplicaSet] = []

    async def start(policy: ReplicaPolicy = NO_RESTARTS, **faults) -> ReplicaSet:
        model = ModelSettings(str(write_model("S", tmp_path)), ("S",), hf_overrides=faults)
        config = EngineConfig(model=model, parallel=ParallelSettings(data_parallel_size=2))
        made.append(await ReplicaSet.start(config, module=WORKER, policy=policy))
        return made[-1]

    yield start
    for engine in made:
        await asyncio.to_thread(engine.close)


async def text_of(engine: ReplicaSet, prompt, params: SamplingParams = SHORT) -> str:
    return "".join([o.outputs[0].text async for o in engine.generate(prompt, params)])


async def until(claim, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():
            await asyncio.sleep(0.01)


def running(engine: ReplicaSet) -> list[int]:
    return [replica.llm.load.num_running for replica in engine._replicas]


def states(engine: ReplicaSet) -> list[str]:
    return [status.state for status in engine.replicas()]


async def samples(engine: ReplicaSet, name: str) -> dict[str, float]:
    """Values by the label `engine`."""
    text = (await engine.metrics_text()).decode()
    found = re.findall(rf'^{name}{{.*?engine="(\d)".*?}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


async def test_both_answer_and_what_is_asked_of_one_is_asked_of_all(replicas):
    engine = await replicas(step_s=0.002)
    texts = await asyncio.gather(*[text_of(engine, text) for text in ("ABC", "KLM", "abc") * 4])
    assert texts == ["DEFGH", "NOPQR", "defgh"] * 4
    given = await samples(engine, "vllm:generation_tokens_total")
    assert sum(given.values()) == 60
    assert min(given.values()) > 0
    text = (await engine.metrics_text()).decode()
    assert text.count("# TYPE vllm:generation_tokens_total ") == 1
    assert await samples(engine, "jaxpaged:replica_up") == {"0": 1.0, "1": 1.0}
    async for _ in (leaving := engine.generate("ABC", FOREVER, "mine")):
        break
    with pytest.raises(RequestError, match="requests are running"):
        await engine.control("sleep", 1)
    assert (await engine.explanation("mine"))["request_id"] == "mine"
    await leaving.aclose()
    await until(lambda: engine.load.num_running == 0 and not engine.num_open_requests)
    assert await engine.control("reset_prefix_cache") is None
    assert await engine.control("is_sleeping") is False
    cells = (await engine.control("picture")).cells
    assert (len(cells), cells[0], cells[2], cells[1] == cells[3]) == (4, NULL, NULL, False)
    with pytest.raises(RequestError, match="no control"):
        await engine.control("nonsense")
    assert states(engine) == ["ready", "ready"]
    assert engine.seconds_without_progress == 0.0
    unseeded = [await engine.submit("ABC", SHORT, str(number), Inbox(0)) for number in range(4)]
    assert len({request.seed for request, _ in unseeded}) == 4  # no two replicas draw the same


async def test_a_pinned_prefix_is_on_every_replica_and_on_one_that_comes_back(replicas):
    engine = await replicas(RESTARTS)
    params = SamplingParams(temperature=0, max_tokens=0, output_kind=OutputKind.FINAL_ONLY)
    prompt = {"prompt_token_ids": byte_ids("A" * 32)}
    answers = [o async for o in engine.generate(prompt, params, pin=Pin("prefix-1"))]
    assert [answer.finished for answer in answers] == [True]
    expected = [{"id": "prefix-1", "tokens": 32}]
    assert await engine.control("warm_prefixes") == expected
    both = [await r.llm.control("warm_prefixes") for r in engine._replicas]
    assert both == [expected, expected]
    os.kill(engine._replicas[0].llm._process.pid, signal.SIGKILL)
    await until(lambda: states(engine) == ["restarting", "ready"])
    await until(lambda: states(engine) == ["ready", "ready"])
    assert await engine._replicas[0].llm.control("warm_prefixes") == expected  # computed again
    assert await engine.control("drop_prefix", "prefix-1") is True
    assert await engine.control("warm_prefixes") == []


async def test_a_killed_replica_costs_its_begun_answers_and_the_other_answers_on(replicas):
    engine = await replicas(step_s=0.01)
    inboxes = [Inbox(0) for _ in range(6)]
    for number, inbox in enumerate(inboxes):
        await engine.submit(f"{number}BC", FOREVER, str(number), inbox)
    await until(lambda: running(engine) == [3, 3])
    first = [await inbox.take() for inbox in inboxes]
    assert all(first)
    os.kill(engine._replicas[1].llm._process.pid, signal.SIGKILL)

    async def end_of(inbox: Inbox) -> str:
        try:
            for _ in range(20):
                await inbox.take()
        except EngineStopped:
            return "failed"
        return "goes on"

    ends = await asyncio.wait_for(asyncio.gather(*[end_of(inbox) for inbox in inboxes]), 10)
    assert sorted(ends) == ["failed"] * 3 + ["goes on"] * 3
    await until(lambda: states(engine) == ["ready", "out"])
    assert engine.is_running
    assert await text_of(engine, "ABC") == "DEFGH"
    assert await samples(engine, "jaxpaged:replica_up") == {"0": 1.0, "1": 0.0}


@pytest.mark.parametrize("fault", ["raise", "hang"])
async def test_a_request_that_has_no_answer_yet_moves_to_another_replica(replicas, fault):
    engine = await replicas(fault=fault, step=1, rank=1)
    texts = [text_of(engine, prompt) for prompt in ("ABC", "KLM", "abc", "def")]
    answers = await asyncio.wait_for(asyncio.gather(*texts), 20)
    assert answers == ["DEFGH", "NOPQR", "defgh", "ghijk"]
    assert (await samples(engine, "jaxpaged:requests_moved_total"))["1"] >= 1
    await until(lambda: states(engine) == ["ready", "out"])
    assert engine._dispatcher._router.loads == [0.0, 0.0]


async def test_a_replica_that_died_comes_back_and_is_sent_requests_again(replicas):
    engine = await replicas(RESTARTS)
    old = engine._replicas[0].llm
    os.kill(old._process.pid, signal.SIGKILL)
    await until(lambda: states(engine) == ["restarting", "ready"])
    assert await text_of(engine, "ABC") == "DEFGH"
    await until(lambda: states(engine) == ["ready", "ready"], 30)
    assert engine._replicas[0].llm is not old
    assert (await samples(engine, "jaxpaged:replica_restarts_total"))["0"] == 1
    for text in ("KLM", "abc", "def"):
        await text_of(engine, text)
    assert (await samples(engine, "vllm:generation_tokens_total"))["0"] > 0


async def test_a_replica_that_hangs_while_it_is_started_again_is_ended_in_time(replicas, tmp_path):
    stuck = tmp_path / "stuck"
    engine = await replicas(ReplicaPolicy(2.0, 10.0, restart_delays_s=(0.05,)), stuck=str(stuck))
    engine._replicas[0].begin.keywords["startup_s"] = 2.0
    stuck.touch()
    os.kill(engine._replicas[0].llm._process.pid, signal.SIGKILL)
    await until(lambda: states(engine) == ["out", "ready"])


async def test_the_end_of_all_replicas_is_told_and_nothing_runs(replicas):
    engine = await replicas(fault="exit", step=5, step_s=0.01)
    answers = [text_of(engine, f"{number}BC", FOREVER) for number in range(4)]
    results = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 10)
    assert all(isinstance(result, EngineStopped) for result in results)
    await until(lambda: not engine.is_running)
    with pytest.raises(EngineStopped):
        await text_of(engine, "ABC")


def test_texts_are_merged_by_name():
    one = b'# HELP a x\n# TYPE a counter\na{engine="0"} 1.0\n# HELP b y\n# TYPE b gauge\nb 2.0\n'
    two = b'# HELP a x\n# TYPE a counter\na{engine="1"} 3.0\n'
    merged = merge_texts([one, two]).decode().splitlines()
    assert merged[:4] == [
        "# HELP a x",
        "# TYPE a counter",
        'a{engine="0"} 1.0',
        'a{engine="1"} 3.0',
    ]
    assert merged[4:] == ["# HELP b y", "# TYPE b gauge", "b 2.0"]


def test_every_replica_has_devices_of_its_own():
    settings = ParallelSettings(data_parallel_size=2, device_ids=(5, 3))
    assert [settings.replica(index).device_ids for index in range(2)] == [(5,), (3,)]
    assert ParallelSettings(data_parallel_size=3).replica(2).device_ids == (2,)
    assert ParallelSettings(data_parallel_size=3).replica(2).data_parallel_rank == 2
    for ids in ((1,), (1, 1), (1, 2, 3)):
        with pytest.raises(ConfigError, match="2 different ones are needed"):
            ParallelSettings(data_parallel_size=2, device_ids=ids)


@pytest.mark.slow  # two processes load JAX and compile
@pytest.mark.parametrize(("num_shards", "num_stages"), [(1, 1), (2, 1), (2, 2)])
async def test_the_tokens_of_two_replicas_are_those_of_one_engine(
    parts_r, model_folder, tmp_path, num_shards, num_stages
):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, length).tolist() for length in (5, 9, 13, 14)]
    params = SamplingParams(temperature=0, max_tokens=4, output_kind=OutputKind.FINAL_ONLY)
    alone = LLM.from_parts(parts_r).generate(prompts, params, use_tqdm=False)
    settings = engines.TINY_SETTINGS | {"batch_buckets": (4,), "token_buckets": (16,)}
    settings |= {"compile_cache_dir": str(tmp_path), "max_num_batched_tokens": 16}  # few programs
    settings |= {"data_parallel_size": 2, "tensor_parallel_size": num_shards}
    settings |= {"pipeline_parallel_size": num_stages}
    config = config_from_keywords(model=str(model_folder / "R"), **settings)
    engine = await ReplicaSet.start(config)
    try:
        answers = [[o async for o in engine.generate(prompt, params)] for prompt in prompts]
        given = await samples(engine, "vllm:generation_tokens_total")
    finally:
        await asyncio.to_thread(engine.close)
    assert [a.outputs[0].token_ids for (a,) in answers] == [a.outputs[0].token_ids for a in alone]
    assert given == {"0": 8.0, "1": 8.0}
