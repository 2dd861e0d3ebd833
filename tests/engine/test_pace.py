"""Planning waits for newcomers while the device is busy, and never longer."""

import threading
from types import SimpleNamespace

import pytest

from benchmarks.host_loop import make_llm
from jaxpaged.core.buckets import Bucket
from jaxpaged.core.params import SamplingParams
from jaxpaged.engine import engine as engine_module
from jaxpaged.engine import pipeline as pipeline_module
from jaxpaged.engine.engine_thread import EngineThread
from jaxpaged.engine.pace import MARGIN_S, SCARCE_S, Pace
from jaxpaged.text.tokenizer import ids_only_tokenizer
from tests.support.scripted_engine import ScriptedDevice

STEP = Bucket("decode", "greedy", 8, 8)
LARGER = Bucket("mixed", "greedy", 512, 8)
SMALLER = Bucket("decode", "greedy", 1, 1)
ROWS, STEP_S = 4, 0.05


def pace_of(*seconds: float, bucket: Bucket = STEP) -> Pace:
    pace = Pace()
    for each in seconds:
        pace.ended(bucket, each)
    return pace


def test_a_step_is_taken_to_last_as_long_as_the_shortest_of_late():
    pace = pace_of(0.01, 0.030, 0.020, 0.025, 0.022)  # the first is too long ago
    pace.planned(0.001)
    assert pace.latest(STEP, 7.0) == pytest.approx(7.020 - 0.001 - MARGIN_S)


def test_nothing_waits_for_a_size_that_was_seen_too_seldom():
    assert pace_of(5.0, 5.0).latest(STEP, 7.0) == 0.0


def test_a_larger_step_that_is_not_known_lasts_at_least_as_long_as_a_smaller_one():
    pace = pace_of(0.020, 0.020, 0.020)
    assert pace.latest(LARGER, 7.0) == pytest.approx(7.020 - MARGIN_S)
    assert pace.latest(SMALLER, 7.0) == 0.0


def test_planning_that_took_long_is_remembered_for_a_while():
    pace = pace_of(0.020, 0.020, 0.020)
    pace.planned(0.005)
    pace.planned(0.001)
    long_ago = pace.latest(STEP, 0.0)
    for _ in range(50):
        pace.planned(0.001)
    assert long_ago < pace.latest(STEP, 0.0) == pytest.approx(0.019 - MARGIN_S, rel=1e-4)


def test_short_steps_are_not_waited_for():
    assert pace_of(*[MARGIN_S + 0.001] * 3).latest(STEP, 7.0) == 0.0


def test_a_step_that_ended_before_the_next_was_there_is_not_relied_on():
    """What was seen of it is the wait itself: kept, it would be waited for again and again."""
    pace = pace_of(1.0, 1.0, 1.0)
    pace.ended(STEP, 1.0, left=SCARCE_S / 2)
    assert pace.latest(STEP, 7.0) == 0.0
    for _ in range(4):
        pace.ended(STEP, 0.020)
    assert pace.latest(STEP, 7.0) == pytest.approx(7.020 - MARGIN_S)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class TimedDevice(ScriptedDevice):
    """Every step ends so long after the one before, however long the host takes."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.script, self.repeats, self.clock, self.last = "Hello.", True, clock, clock.now

    def read(self, pending):
        self.last = max(self.last + STEP_S, self.clock.now)
        self.clock.now = self.last
        return super().read(pending)


@pytest.fixture
def timed_engine(monkeypatch):
    clock = Clock()
    for module in (engine_module, pipeline_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    llm = make_llm(ROWS, ids_only_tokenizer(), 1000)
    engine, device = llm.parts.engine, TimedDevice(clock)
    engine.steps.runner, engine.steps.on_step = device, device.on_step

    def add(count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        for _ in range(count):
            engine.add(llm.parts.inputs.request([5] * 8, params))

    return engine, clock, add


def test_an_engine_with_a_free_slot_can_wait_until_just_before_its_step_ends(timed_engine):
    engine, clock, add = timed_engine
    add(ROWS - 1)
    assert engine.spare_s() == 0.0
    for _ in range(8):
        engine.step()
    assert engine.spare_s() == pytest.approx(STEP_S - MARGIN_S)
    clock.now += STEP_S
    assert engine.spare_s() < 0


def test_an_engine_does_not_wait_when_every_slot_is_taken_or_spoken_for(timed_engine):
    engine, _, add = timed_engine
    add(ROWS - 1)
    for _ in range(8):
        engine.step()
    add(1)
    assert engine.spare_s() == 0.0  # it waits for the slot
    engine.step()
    assert engine.spare_s() == 0.0


def test_a_wait_that_was_too_long_is_not_repeated(timed_engine):
    engine, clock, add = timed_engine
    add(1)
    for _ in range(8):
        engine.step()
    assert engine.spare_s() > 0
    clock.now += 2 * STEP_S  # the thread was held up: the device has waited
    engine.step()
    assert engine.spare_s() <= 0


def test_the_thread_obeys_while_it_waits_and_then_steps():
    added, stepped = list[str](), threading.Event()

    class Stub:
        has_work, last_progress_time = True, 0.0

        def step(self) -> list[str]:
            stepped.set()
            self.has_work = False
            return list(added)

    given = list[list[str]]()
    thread = EngineThread(
        "stub", Stub(), given.append, lambda error: None, spare_s=lambda: 0.0 if added else 60.0
    )
    assert not stepped.wait(0.05)
    thread.send(lambda: added.append("newcomer"))
    assert stepped.wait(10)
    thread.stop()
    assert given == [["newcomer"]]


def test_a_thread_that_waits_can_be_stopped():
    class Stub:
        has_work, last_progress_time = True, 0.0

        def step(self) -> list[str]:
            raise AssertionError("it was to wait")

    thread = EngineThread(
        "stub", Stub(), lambda events: None, lambda error: None, spare_s=lambda: 60
    )
    thread.stop()
    assert not thread.is_running
