import pytest

from jaxpaged.core.recording import RecordedScheduler, replay
from jaxpaged.core.steady import SteadyRows
from tests.core.fake_device import Loop, make_scheduler, make_sequence


@pytest.fixture
def num_steady(monkeypatch):
    """How many sequences each plan began with."""
    found, plan = [], SteadyRows.plan

    def counted(rows, draft, order):
        found.append(plan(rows, draft, order))
        return found[-1]

    monkeypatch.setattr(SteadyRows, "plan", counted)
    return found


@pytest.mark.parametrize(
    ("policy", "window", "num_pages"),
    [("fcfs", 0, 200), ("fcfs", 0, 18), ("fcfs", 6, 18), ("fair", 0, 18), ("sjf", 0, 18)],
)
def test_plans_are_as_if_every_row_were_made_anew(
    tmp_path, monkeypatch, num_steady, policy, window, num_pages
):
    """While others come, end, are aborted, and preempted where pages are few."""
    file, limits = tmp_path / "run.jsonl", {"max_num_seqs": 8, "scheduling_policy": policy}
    scheduler = make_scheduler(num_pages=num_pages, window=window, num_local_pages=10, **limits)
    loop = Loop(RecordedScheduler(scheduler, file))
    seqs = [make_sequence(i, range(1 + i % 5), 12 + 7 * (i % 3)) for i in range(14)]
    for i, seq in enumerate(seqs):
        loop.scheduler.add(seq)
        loop.step()
        if i in (4, 9):
            loop.scheduler.abort(seqs[i - 2])
    loop.run()
    assert sum(num_steady) > 40
    assert (scheduler.num_preemptions > 0) == (num_pages < 200)
    monkeypatch.setattr(SteadyRows, "learn", lambda *_: None)
    monkeypatch.setattr(SteadyRows, "add_row", lambda *_: False)
    assert replay(file).mismatch is None
