"""Whoever asks an engine that is about to die gets an answer."""

import asyncio
import threading

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import TokenEvent
from jaxpaged.engine.inbox import PIECE, Inbox, Sinks
from jaxpaged.errors import EngineStopped
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


def told_by(sinks: Sinks) -> list[str]:
    """The names of sinks, as they are told something."""
    told: list[str] = []
    for name, sink in sinks.items():
        sink.put = lambda event, name=name: told.append(name)
        sink.fail = lambda error, name=name: told.append(f"{name} failed")
    return told


def events_of(*names: str, ended: tuple[str, ...] = ()) -> list[TokenEvent]:
    return [
        TokenEvent(name, 0, (7,), "", None, None, "stop" if name in ended else None, None, 0, 0.0)
        for name in names
    ]


def test_a_first_token_is_told_before_those_of_streams_that_run():
    sinks = Sinks({name: Inbox(0) for name in ("old", "new")})
    told = told_by(sinks)
    sinks.deliver(events_of("old", "gone", "new"))
    assert told == ["new", "old"]


def test_an_answer_that_ends_is_told_before_all_others():
    sinks = Sinks({name: Inbox(0) for name in ("oldest", "old", "new")})
    told = told_by(sinks)
    sinks.deliver(events_of("oldest", "old", "new", ended=("old",)))
    assert told == ["old", "new", "oldest"]


async def test_between_pieces_of_a_step_the_event_loop_does_other_work():
    names = [str(i) for i in range(3 * PIECE)]
    sinks = Sinks({name: Inbox(0) for name in names})
    told = told_by(sinks)
    sinks.deliver(events_of(*names))
    asyncio.get_running_loop().call_soon(lambda: told.append("other"))
    while len(told) <= len(names):
        await asyncio.sleep(0)
    told.remove("other")
    assert told == names[::-1]
    sinks.deliver(events_of(*names))
    assert len(told) == len(names) + PIECE


@pytest.mark.parametrize("then", ["step", "failure", "end of all"])
async def test_what_comes_next_never_overtakes_what_is_left_of_a_step(then):
    names = [str(i) for i in range(3 * PIECE)]
    sinks = Sinks({name: Inbox(0) for name in names})
    told = told_by(sinks)
    sinks.deliver(events_of(*names))
    match then:
        case "step":
            sinks.deliver(events_of("0", ended=("0",)))
        case "failure":
            sinks.fail("0", EngineStopped("gone"))
        case _:
            sinks.fail_all(EngineStopped("gone"))
    await asyncio.sleep(0.01)
    assert told[: len(names)] == names[::-1]
    assert len(told) == len(names) * (2 if then == "end of all" else 1) + (then != "end of all")
