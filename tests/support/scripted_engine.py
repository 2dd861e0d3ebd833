"""The real engine over a device that computes nothing and says what a script says, at its pace."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host_loop import MAX_LEN, InstantDevice, make_llm
from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.plan import StepPlan
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.engine.runner import PendingStep, StepResult
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import load_tokenizer
from tests.support.fake_engine import parts_without_device
from tests.support.models import EOS, VOCAB, byte_ids, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


class ScriptedDevice(InstantDevice):
    """Every answer is `script`, a byte a step of `step_s` seconds, again and again if `repeats`."""

    def __init__(self) -> None:
        self.script, self.repeats, self.step_s = "Hello.", False, 0.0
        self._places: deque[list[int]] = deque()

    def on_step(self, plan: StepPlan) -> None:
        """Note the places in their answers of the tokens that a step is to sample."""
        self._places.append(
            [row.start + row.q_len - row.seq.num_prompt_tokens for row in plan.rows]
        )

    def read(self, pending: PendingStep) -> StepResult:
        time.sleep(self.step_s)
        ids, result = [*byte_ids(self.script), EOS], super().read(pending)
        tokens = result.token_ids.copy()
        for row, place in enumerate(self._places.popleft()):
            at = place % (len(ids) - 1) if self.repeats else min(place, len(ids) - 1)
            tokens[row] = ids[max(at, 0)]
        return replace(result, token_ids=np.asarray(tokens))

    def close(self) -> None:
        """There is nothing to free."""


def scripted_llm(folder: Path, names: tuple[str, ...], rows: int = 4) -> tuple[Any, Any]:
    """An AsyncLLM and its device; the pool has 256 pages a row."""
    write_tokenizer(folder)
    tokenizer, device = load_tokenizer(folder), ScriptedDevice()
    engine = make_llm(rows, tokenizer, VOCAB).parts.engine
    engine.steps.runner, engine.steps.on_step = device, device.on_step
    config = EngineConfig(model=ModelSettings(model=str(folder), served_model_name=names))
    inputs = InputProcessor(tokenizer, VOCAB, MAX_LEN, 0, ())
    parts = parts_without_device(engine, inputs, config)
    template = ChatTemplate(TEMPLATE, tokenizer.special_tokens)
    return AsyncLLM(replace(parts, template=template)), device
