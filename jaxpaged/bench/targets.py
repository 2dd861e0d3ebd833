"""What one H200 should reach, and what vLLM 0.26.0 with FlashAttention 3 reaches on one.

The peer's raw lines are in `benchmarks/peer`. `floor` is the least that we accept, `goal` what we
aim at. Every figure is in the unit of its name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A figure beside which a measurement is printed."""

    unit: str
    floor: float
    goal: float
    peer: float | None = None

    def columns(self) -> dict[str, str | float]:
        found: dict[str, str | float] = {"unit": self.unit, "floor": self.floor, "goal": self.goal}
        return found if self.peer is None else found | {"peer": self.peer}


ATTENTION = {  # by case; page 16
    "d256x1024_32_8": Target("TB/s", 3.8, 4.1, 3.93),
    "d32x4096_32_8": Target("TB/s", 3.9, 4.15, 4.10),
    "d64x1024_40_40": Target("TB/s", 4.0, 4.2, 4.13),
    "d256x1024_28_4": Target("TB/s", 3.5, 3.8, 3.62),
    "d256_ragged": Target("TB/s", 3.8, 4.1, 4.01),
    "d1x8192": Target("us", 22, 15, 17.3),
    "d1x32768": Target("us", 50, 40, 44.4),
    "p8192": Target("TFLOP/s", 550, 680, 640.4),
    "chunk2048on8192": Target("TFLOP/s", 500, 620, 587.4),
    "mixed": Target("us", 430, 370, 394.8),
}
SAMPLER_MS = Target("ms", 0.6, 0.4)  # mixed parameters, 256 x 128,256
STEP_MS = {  # llama3-8b, greedy: (rows, context)
    (1, 1024): Target("ms", 4.2, 3.8),
    (64, 1024): Target("ms", 6.6, 6.0),
    (256, 1024): Target("ms", 14.8, 13.8),
    (256, 384): Target("ms", 10.0, 8.9),
}
STARTUP_S = {  # process start to ready, by state of the cache of programs
    ("llama3-8b", "cold"): Target("s", 60, 30, 109),
    ("llama3-8b", "warm"): Target("s", 15, 10),
}
_FIGURES = {  # the peer's better run, and the goal
    "llama3-8b": ((19448, 25000), (8976, 12000), (4.8664, 3.9), (43264, 46000)),
    "qwen2.5-7b": ((24854, 31000), (11220, 15000), (4.6385, 3.7), (47135, 50000)),
    "qwen2.5-0.5b": ((35884, 70000), (15329, 30000), (2.0422, 0.9), (452796, 500000)),
    "llama2-13b": ((5897, 7500), (3145, 4300), (7.74, 6.5), (24190, 25500)),
}
# how a workload is judged: unit, the measurement's column, floor as a multiple of the peer
WORKLOAD_UNITS = {
    "decode": ("tok/s", "output_tok_per_s", 1.1),
    "mixed": ("tok/s", "output_tok_per_s", 1.1),
    "latency": ("ms", "ms_per_token_after_first", 1 / 1.1),
    "prefill": ("tok/s", "prompt_tok_per_s", 1.0),
}
HTTP = {  # goals of the loads of `bench serve` for qwen2.5-7b, in the client's columns
    "decode": {"output_tok_per_s": 28000},
    "mixed": {"output_tok_per_s": 14000, "ttft_ms": {"p50": 100, "p99": 1500}},
    "open": {"ttft_ms": {"p50": 18, "p99": 40}, "itl_ms": {"p50": 4.0, "p99": 10}},
    "latency": {"ttft_ms": {"p50": 9}, "tpot_ms": {"p50": 3.8}},
}


def workload_target(model: str, workload: str) -> Target | None:
    """The target of one of the peer's models by its label, or None for another model."""
    if model not in _FIGURES or workload not in WORKLOAD_UNITS:
        return None
    unit, _, factor = WORKLOAD_UNITS[workload]
    peer, goal = _FIGURES[model][list(WORKLOAD_UNITS).index(workload)]
    return Target(unit, round(peer * factor, 2), goal, peer)
