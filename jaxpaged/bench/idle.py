"""How long the GPU waits while the whole engine decodes: scheduler, batch builder, read-back."""

from time import monotonic
from typing import Any

import numpy as np

from jaxpaged.bench.kernel_times import DeviceTrace, KernelRun, idle_time
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.request import Request
from jaxpaged.engine.llm import LLM
from jaxpaged.errors import ConfigError

SETTLING_STEPS = 8  # decodes before the clock, and again after the profiler has started


class _Watch:
    """Told of every step that starts: times some decodes, traces as many, times as many again.

    Context grows meanwhile, so the mean of both times belongs to the steps between them.
    """

    def __init__(self, num_steps: int):
        traced, self._trace = SETTLING_STEPS + num_steps, DeviceTrace()
        self._timed = [SETTLING_STEPS, SETTLING_STEPS + num_steps]
        self._start = self._timed[1] + 1
        self._stop = self._start + traced
        self._timed += [self._stop + SETTLING_STEPS, self._stop + traced]
        self.num_decodes = self._timed[-1] + 1
        self.runs: list[KernelRun] = []
        self._times: list[float] = []
        self._count, self._num_steps = 0, num_steps

    @property
    def step_s(self) -> float:
        first, last, again, end = self._times
        return (last - first + end - again) / (2 * self._num_steps)

    def __call__(self, plan: StepPlan) -> None:
        if not plan.is_decode_only:
            return
        self._count += 1
        if self._count in self._timed:
            self._times.append(monotonic())
        elif self._count == self._start:
            self._trace.start()
        elif self._count == self._stop:
            self.runs = self._trace.stop()


def measure_idle(llm: LLM, rows: int, context: int, num_steps: int) -> dict[str, Any]:
    """Decode `rows` sequences whose context comes to about `context` tokens; greedy.

    Returns:
        Milliseconds of a step by the clock, without the profiler; then from a trace: milliseconds
        of it in which a kernel ran, the share of time with none, the share of that which lies
        between steps, and the share that the untraced step leaves unused.
    """
    watch, config = _Watch(num_steps), llm.parts.config.scheduler
    prompt_len = max(context - watch.num_decodes // 2, 1)
    # some decode while others are still in their prompts
    prompt_steps = -(-rows * (prompt_len + 1) // (config.max_num_batched_tokens or 1)) + 1
    most = llm.model_config.max_len - prompt_len
    params = SamplingParams(
        temperature=0.0,
        max_tokens=watch.num_decodes + prompt_steps,
        ignore_eos=True,
        detokenize=False,
    )
    if watch.num_decodes + prompt_steps > most:
        raise ConfigError(
            f"{num_steps} idle steps at context {context} end past max_model_len of "
            f"{llm.model_config.max_len}: lower --idle-steps or the context"
        )
    ids = np.random.RandomState(0).randint(0, llm.model_config.vocab, (rows, prompt_len))
    jobs: list[tuple[str | None, Request]] = [
        (None, llm.parts.inputs.request(prompt, params)) for prompt in ids.tolist()
    ]
    llm.reset_prefix_cache()
    llm.parts.engine.steps.on_step = watch
    try:
        for _ in llm.run(jobs, max_inflight=rows):
            pass
    finally:
        llm.parts.engine.steps.on_step = None
    return idle_line(watch.runs, watch.step_s, num_steps)


def idle_line(runs: list[KernelRun], step_s: float, num_steps: int) -> dict[str, Any]:
    """The measurement's columns. The steps right after the profiler's start are left out."""
    line: dict[str, Any] = {"engine_step_ms": round(1e3 * step_s, 3)}
    idle = idle_time(runs, SETTLING_STEPS + num_steps, SETTLING_STEPS)
    if idle is not None:
        busy_ms = idle.busy / idle.steps / 1e3
        line |= {
            "busy_ms": round(busy_ms, 3),
            "traced_step_ms": round(idle.span / idle.steps / 1e3, 3),
            "idle": round(1 - idle.busy / idle.span, 4),
            "idle_between_steps": round(idle.between / idle.span, 4),
            "idle_by_clock": round(1 - busy_ms / 1e3 / step_s, 4),
        }
    return line
