"""Whoever asks an engine that is about to die gets an answer."""

import asyncio
import threading

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import TokenEvent
from jaxpaged.engine.inbox import Inbox, Sinks
from jaxpaged.errors import CapacityError, EngineStopped
from tests.support.fake_engine import fake_llm

PARAMS = SamplingParams(temperature=0.0, max_tokens=2)


async def test_what_was_asked_of_an_engine_that_dies_in_its_step_is_answered(tmp_path):
    llm, engine = fake_llm(tmp_path)
    go, in_step = threading.Event(), threading.Event()

    def die(step):
        in_step.set()
        go.wait(20)
        raise MemoryError("no more memory")

    engine.before_step = die
    await llm.submit("ABC", PARAMS, "first", Inbox(0))
    await asyncio.to_thread(in_step.wait, 20)
    asked = asyncio.create_task(llm.control("warm_prefixes"))
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(EngineStopped, match="no more memory"):
        await asyncio.wait_for(asked, 10)
    with pytest.raises(EngineStopped, match="no more memory"):
        await asyncio.wait_for(llm.control("warm_prefixes"), 10)
    llm.close()


async def test_a_request_that_comes_behind_a_sleep_is_refused_and_reaches_no_step(tmp_path):
    llm, engine = fake_llm(tmp_path)
    go = threading.Event()
    engine.scheduler.reset_prefix_cache = lambda: go.wait(20)  # the first thing that a sleep does
    engine.runner.free = lambda: None
    asleep, inbox = asyncio.create_task(llm.control("sleep", 2)), Inbox(0)
    await asyncio.sleep(0)
    await llm.submit("ABC", PARAMS, "late", inbox)
    go.set()
    await asleep
    with pytest.raises(CapacityError, match="the engine sleeps"):
        await asyncio.wait_for(inbox.take(), 10)
    assert engine.num_steps == 0
    llm.close()


def test_a_first_token_is_told_before_those_of_streams_that_run():
    sinks = Sinks({name: Inbox(0) for name in ("old", "new")})
    told: list[str] = []
    for name, sink in sinks.items():
        sink.put = lambda event, name=name: told.append(name)
    names = "old", "gone", "new"
    sinks.deliver([TokenEvent(name, 0, (7,), "", None, None, None, None, 0, 0.0) for name in names])
    assert told == ["new", "old"]
