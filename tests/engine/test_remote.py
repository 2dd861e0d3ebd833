"""An engine in a process of its own answers like one in a thread; neither outlives the other."""

import asyncio
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.engine.inbox import Inbox
from jaxpaged.engine.remote import RemoteLLM
from jaxpaged.engine.wire import Frames, Refusal, Start, frame, to_front
from jaxpaged.errors import (
    ConfigError,
    EngineStopped,
    InvariantError,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from tests.support.models import byte_ids, write_model

WORKER = "tests.support.fake_worker"
FOREVER = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


@pytest.fixture
async def remote(tmp_path: Path):
    """Start engines over the successor model; keywords are the faults of the fake worker."""
    made: list[RemoteLLM] = []

    async def start(**faults) -> RemoteLLM:
        model = ModelSettings(str(write_model("S", tmp_path)), ("S",), hf_overrides=faults)
        made.append(await RemoteLLM.start(EngineConfig(model=model), module=WORKER))
        return made[-1]

    yield start
    for llm in made:
        await asyncio.to_thread(llm.close)


async def text_of(llm: RemoteLLM, prompt, params: SamplingParams) -> str:
    return "".join([o.outputs[0].text async for o in llm.generate(prompt, params)])


async def until(claim, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():
            await asyncio.sleep(0.01)


async def test_what_cannot_be_read_beside_the_process_is_told_once(tmp_path, caplog):
    async def template():
        raise ConfigError("no such file")

    model = ModelSettings(str(write_model("S", tmp_path)), ("S",))
    start = Start(EngineConfig(model=model), "info", False)
    with pytest.raises(ConfigError, match="no such file"):
        await RemoteLLM.open(start, template(), WORKER)
    await asyncio.sleep(0.1)
    gc.collect()
    assert not caplog.records


async def test_it_answers_refuses_and_gives_up_what_is_left(remote):
    llm = await remote(step_s=0.002)
    params = SamplingParams(temperature=0, max_tokens=5, output_kind=OutputKind.DELTA, n=1)
    prompts = ["ABC", byte_ids("KLM"), {"prompt_token_ids": byte_ids("abc")}] * 5
    texts = await asyncio.gather(*[text_of(llm, prompt, params) for prompt in prompts])
    assert texts == ["DEFGH", "NOPQR", "defgh"] * 5
    with pytest.raises(RequestError) as caught:
        await text_of(llm, [1] * 2048, params)
    assert caught.value.param == "prompt"
    async for _ in (leaving := llm.generate("ABC", FOREVER)):
        break
    await leaving.aclose()
    await until(lambda: not llm.load.num_running and not llm.num_open_requests)
    assert b'vllm:generation_tokens_total{engine="0"' in await llm.metrics_text()
    await llm.submit("ABC", FOREVER, "open", Inbox(0))
    await until(lambda: llm.load.num_running)
    assert (await llm.explanation("open"))["request_id"] == "open"
    llm.release("open", is_finished=False)
    assert await llm.explanation("none") is None
    await until(lambda: not llm.load.num_running)
    assert llm.is_running
    assert llm.seconds_without_progress == 0.0


async def test_an_abort_ends_answers_where_they_are(remote):
    llm = await remote(step_s=0.002)
    params = dataclasses.replace(FOREVER, n=2, stop=["IJKx"], output_kind=OutputKind.CUMULATIVE)
    async for output in llm.generate("ABC", params, "mine"):
        if len(output.outputs[0].token_ids) == 8:  # "IJK" is held back
            await llm.abort("mine")
    assert output.finished
    assert [part.finish_reason for part in output.outputs] == ["abort", "abort"]
    for part in output.outputs:
        assert part.text.startswith("DEFGHIJK")
        assert part.text.encode()[-1] == 67 + len(part.token_ids)
    await llm.abort("nobody")
    await until(lambda: not llm.load.num_running)


async def test_what_cannot_be_sent_is_refused_and_harms_nobody(remote, monkeypatch):
    llm = await remote()
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=OutputKind.DELTA)
    with pytest.raises(RequestError, match="64 bits"):
        async for _ in llm.generate("ABC", params, priority=2**64):
            pass
    assert await text_of(llm, "ABC", params) == "DEF"
    monkeypatch.setattr(llm, "submit_order", None)  # what can only be refused is not sent at all
    for prompt, given, param in (
        ([1] * 3000, params, "prompt"),
        ("A", SamplingParams(stop_token_ids=[10**40]), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            await text_of(llm, prompt, given)
        assert caught.value.param == param


async def test_an_error_that_nobody_foresaw_leaves_no_request_waiting(remote):
    llm = await remote(fault="submit")
    with pytest.raises(InvariantError, match="internal error"):
        async with asyncio.timeout(10):
            await text_of(llm, "ABC", FOREVER)
    assert llm.is_running


@pytest.mark.parametrize("fault", ["raise", "exit"])
async def test_its_end_is_told_to_every_request_within_a_second(remote, fault):
    llm = await remote(fault=fault, step=20, step_s=0.01)
    begun = time.monotonic()
    answers = [text_of(llm, "ABC", FOREVER) for _ in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 5)
    assert all(isinstance(result, EngineStopped) for result in results)
    assert time.monotonic() - begun < 20 * 0.01 + 2
    await until(lambda: not llm.is_running, 1.0)
    with pytest.raises(EngineStopped):
        await text_of(llm, "ABC", FOREVER)
    llm.close()
    assert llm._process.returncode != 0


async def test_a_step_that_hangs_shows_as_missing_progress(remote):
    llm = await remote(fault="hang", step=3)
    task = asyncio.create_task(text_of(llm, "ABC", FOREVER))
    await until(lambda: llm.seconds_without_progress > 0.5)
    assert llm.is_running
    task.cancel()
    await until(lambda: not llm.num_open_requests)
    os.kill(llm._process.pid, signal.SIGSTOP)  # not even signs of life come now
    try:
        await until(lambda: llm.seconds_without_progress > 2.5)
    finally:
        os.kill(llm._process.pid, signal.SIGCONT)


async def test_a_model_that_is_not_there_starts_no_process(tmp_path):
    with pytest.raises(ConfigError):
        await RemoteLLM.start(EngineConfig(model=ModelSettings(str(tmp_path / "none"))))


async def test_what_ends_a_start_is_told_to_the_end(tmp_path, capfd):
    config = EngineConfig(model=ModelSettings(str(write_model("S", tmp_path))))
    with pytest.raises(EngineStopped):
        await RemoteLLM.start(config, module="tests.support.dying_worker")
    assert capfd.readouterr().err.endswith("no memory left\n")


async def test_an_engine_that_is_not_ready_in_time_writes_its_stacks_and_is_ended(tmp_path, capfd):
    faults = {"stuck": str(tmp_path)}
    model = ModelSettings(str(write_model("S", tmp_path)), ("S",), hf_overrides=faults)
    thin = "tests.support.thin_worker"
    with pytest.raises(EngineStopped, match="not ready within 5 s"):
        await RemoteLLM.start(EngineConfig(model=model), module=thin, startup_s=5.0)
    assert "thin_worker.py" in capfd.readouterr().err


def test_the_process_ends_when_its_front_is_killed(tmp_path):
    folder = write_model("S", tmp_path)
    code = (
        "import asyncio, os\n"
        "from jaxpaged.config.settings import EngineConfig, ModelSettings\n"
        "from jaxpaged.engine.remote import RemoteLLM\n"
        "async def main():\n"
        f"    config = EngineConfig(model=ModelSettings({str(folder)!r}))\n"
        f"    llm = await RemoteLLM.start(config, module={WORKER!r})\n"
        "    print(llm._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.01)
    pytest.fail("the engine's process is still there")


@pytest.mark.parametrize(
    "error",
    [RequestError("a", param="n"), QueueFull("b", retry_after_s=7.0), EngineStopped("c")],
)
def test_errors_keep_their_kind_and_what_they_say(error):
    (data,) = Frames().feed(frame(Refusal.of(error, call_id=1)))
    refusal = to_front.decode(data)
    assert isinstance(refusal, Refusal)
    again = refusal.error()
    assert isinstance(error, type(again))
    assert str(again) == str(error)
    for name in ("param", "retry_after_s"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_half_of_a_surrogate_pair_in_an_error_is_sent_as_an_escape():
    (data,) = Frames().feed(frame(Refusal.of(ConfigError("model_type \ud800"), call_id=1)))
    refusal = to_front.decode(data)
    assert isinstance(refusal, Refusal)
    assert str(refusal.error()) == "model_type \\ud800"


def test_a_prompt_too_long_names_both_numbers_also_from_afar():
    error = Refusal.of(PromptTooLong(255, 2, 256), call_id=1).error()
    assert "255" in str(error)
    assert "256" in str(error)


def test_messages_are_found_however_the_bytes_are_cut():
    messages = [Refusal("stopped", "x" * n) for n in (0, 5, 70_000)]
    data = b"".join(map(frame, messages))
    for size in (1, 7, 4096, len(data)):
        frames, found = Frames(), []
        for start in range(0, len(data), size):
            found += [to_front.decode(part) for part in frames.feed(data[start : start + size])]
        assert found == messages
