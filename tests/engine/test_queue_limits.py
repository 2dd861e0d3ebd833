"""How much may wait: requests that the engine's thread has not seen yet count too."""

import asyncio
import threading

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.inbox import Inbox
from jaxpaged.errors import QueueFull
from tests.support.fake_engine import fake_llm
from tests.support.models import byte_ids

PARAMS = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture
async def busy(tmp_path):
    """An engine whose thread stands still in a step."""
    llm, engine = fake_llm(tmp_path, max_num_queued_reqs=3, max_num_queued_tokens=50)
    go, in_step = threading.Event(), threading.Event()

    def wait(step):
        in_step.set()
        go.wait(20)

    engine.before_step = wait
    await llm.submit("ABC", PARAMS, "first", Inbox(0))
    await asyncio.to_thread(in_step.wait, 20)
    yield llm
    go.set()
    llm.close()


async def submit(llm, name, num_tokens):
    await llm.submit(byte_ids("A" * num_tokens), PARAMS, name, Inbox(0))


async def test_requests_over_the_limit_are_refused_however_fast_they_come(busy):
    for name in "abc":
        await submit(busy, name, 5)
    with pytest.raises(QueueFull, match="3 requests wait, at most 3 may"):
        await submit(busy, "d", 5)


async def test_tokens_over_the_limit_are_refused_but_one_prompt_alone_never(busy):
    await submit(busy, "a", 60)
    with pytest.raises(QueueFull, match="60 prompt tokens wait, at most 50 may"):
        await submit(busy, "b", 1)
