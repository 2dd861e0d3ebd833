"""The simulation of a load over HTTP says what a load that was measured showed."""

from benchmarks.http_simulation import Costs, HttpSimulation
from jaxpaged.bench import workloads


def test_a_measured_load_is_met_within_a_tenth(monkeypatch):
    """256 x (128 in, 512 out) gave 24,977 tokens/s, gaps of 8.8 and first tokens until 721 ms."""
    short = workloads.Workload(256, (128, 128), (64, 64), 1)
    monkeypatch.setitem(workloads.WORKLOADS, "decode", short)
    found = HttpSimulation("decode", 8192, 256, 0.0, Costs(), seed=0).run()
    assert 650 < found["first token p99"] < 790
    assert 7.2 < found["gap p50"] < 8.8  # contexts are shorter
