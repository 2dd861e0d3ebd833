import pytest

from jaxpaged.bench.idle import SETTLING_STEPS, idle_line
from jaxpaged.bench.kernel_times import (
    DeviceTrace,
    KernelRun,
    StepWindow,
    idle_time,
    kernel_runs,
    sums_by_name,
)
from jaxpaged.core.plan import PlannedRow, StepPlan
from jaxpaged.errors import ConfigError
from tests.core.fake_device import make_sequence


def steps(count, *, gap, kernels=(3.0, 5.0, 3.0), names=("product", "attention", "product")):
    """A step's kernels one microsecond apart, and `gap` microseconds between steps."""
    runs, now = [], 1000.0
    for _ in range(count):
        for name, micros in zip(names, kernels, strict=True):
            runs.append(KernelRun(name, now, now + micros))
            now += micros + 1.0
        now += gap - 1.0
    return runs


def test_idle_time_tells_gaps_between_steps_from_those_inside():
    idle = idle_time(steps(10, gap=7.0), 10, skip=2)
    assert (idle.steps, idle.span) == (7, 7 * 20.0)
    assert idle.busy == pytest.approx(7 * 11.0)
    assert idle.between == pytest.approx(7 * 7.0)


def test_kernels_that_overlap_are_busy_once_and_host_copies_never():
    runs = steps(6, gap=2.0)
    alone = idle_time(runs, 6, skip=0)
    over = [KernelRun("other", run.start + 1, run.start + 2) for run in runs]
    copies = [KernelRun("MemcpyH2D", run.end, run.end + 1) for run in runs]
    both = sorted([*runs, *over, *copies], key=lambda run: run.start)
    assert idle_time(both, 6, skip=0) == alone


def test_a_step_is_found_by_kernels_that_run_several_times_in_it():
    runs = steps(8, gap=2.0, names=("product",) * 3)
    assert idle_time(runs, 8, skip=1).steps == 6


def test_without_kernels_only_the_clock_is_told():
    assert idle_line([], 0.004, 10) == {"engine_step_ms": 4.0}


def test_the_clock_is_compared_with_the_time_that_kernels_ran():
    traced = 4 + SETTLING_STEPS
    line = idle_line(steps(traced, gap=7.0), 22e-6, 4)
    assert line["idle_by_clock"] == pytest.approx(0.5)
    assert line["idle_between_steps"] == pytest.approx(0.35)
    assert line["idle"] == pytest.approx(0.45)


def test_only_streams_of_gpus_are_read_from_a_trace():
    def process(pid, name):
        return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}

    def thread(pid, tid, name):
        return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}

    def event(pid, tid, name):
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 5, "dur": 2}

    events = [
        process(1, "/device:GPU:0"),
        process(2, "/host:CPU"),
        thread(1, 7, "Stream #7(Compute)"),
        thread(1, 8, "XLA Ops"),
        thread(2, 7, "Stream of thoughts"),
        event(1, 7, "attention"),
        event(1, 8, "attention again"),
        event(2, 7, "python"),
    ]
    assert kernel_runs({"traceEvents": events}) == [KernelRun("attention", 5.0, 7.0)]


def test_a_window_traces_its_steps_and_tells_what_they_were(monkeypatch):
    started = []
    monkeypatch.setattr(DeviceTrace, "start", lambda self: started.append(0))
    monkeypatch.setattr(DeviceTrace, "stop", lambda self: steps(2, gap=1.0))
    window, seq = StepWindow(1, 3), make_sequence()
    for start, q_len in ((0, 6), (6, 1), (8, 3), (9, 1)):
        window(StepPlan.of([PlannedRow(seq, 0, start, q_len, True, 0)]))
    assert window.means() == {
        "steps": 2,
        "decodes": 1,
        "rows": 1,
        "tokens": 2,
        "kv_tokens": 7,
        "kernels_us": 11.0,
    }
    assert started == [0]
    assert sums_by_name(window.runs) == {"product": (4, 12.0), "attention": (2, 10.0)}


def test_a_window_behind_the_last_step_is_an_error(monkeypatch):
    monkeypatch.setattr(DeviceTrace, "start", lambda self: None)
    window = StepWindow(0, 2)
    window(StepPlan())
    with pytest.raises(ConfigError, match="the workload has 1 steps"):
        window.means()
