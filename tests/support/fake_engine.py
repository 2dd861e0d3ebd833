"""The successor model without a device: an engine of known answers under the real AsyncLLM.

After token t come t + 1 (log-probability -0.661), t + 2 (-1.661) and all others (-7.459), or what
a table of successors says. Greedy unless a request has a temperature: then the seed decides.
With a `script` every answer is that text.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxpaged.config.architecture import LayerKind, ModelConfig, RopeConfig
from jaxpaged.config.settings import EngineConfig, ModelSettings, SchedulerSettings
from jaxpaged.core.request import AnswerTimes, Request, TokenEvent, TokenLogprobs
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.capacity import plan_memory
from jaxpaged.engine.factory import EngineParts
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.engine.memory import DeviceMemory
from jaxpaged.engine.picture import (
    BLANK,
    CACHED,
    FIRST_OWNER,
    NULL,
    EnginePicture,
    SequencePicture,
)
from jaxpaged.metrics import EngineLoad, EngineMetrics
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import load_tokenizer
from tests.support.models import EMOJI_RING, EOS, VOCAB, byte_ids, write_tokenizer

NEXT, AFTER_NEXT, REST = -0.661, -1.661, -7.459


def times_of(num_tokens: int) -> AnswerTimes:
    """What every answer of the fake engine is told to have taken: 2 ms, 40 ms, 10 ms a token."""
    if not num_tokens:
        return AnswerTimes(0.002, None, None)
    return AnswerTimes(0.002, 0.04, 0.01 * (num_tokens - 1))


@dataclass(eq=False)
class _Answer:
    request: Request
    choice: int
    token_ids: list[int]  # prompt and answer
    detokenizer: Detokenizer
    num_new: int = 0


@dataclass(eq=False)
class FakeEngine:
    """The engine as AsyncLLM uses it. `before_step` may sleep, raise or block."""

    tokenizer: Any
    metrics: EngineMetrics
    successors: Mapping[int, int] = field(default_factory=dict)
    script: str = ""
    before_step: Callable[[int], None] = lambda step: None
    num_steps: int = 0
    num_aborted: int = 0
    num_pictures: int = 0
    num_pages: int = 20
    last_progress_time: float = field(default_factory=time.monotonic)
    last_request: Request | None = None
    scheduler: Any = field(
        default_factory=lambda: SimpleNamespace(
            num_waiting_tokens=0,
            num_waiting=0,
            reset_prefix_cache=lambda: None,
            pinned=(),
            drop_prefix=lambda prefix_id: False,
        )
    )
    runner: Any = field(default_factory=lambda: SimpleNamespace(close=lambda: None))
    _answers: list[_Answer] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    @property
    def load_size(self) -> int:
        """Answers that are being made."""
        return len(self._answers)

    def add(self, request: Request) -> None:
        self.last_request = request
        prompt = list(request.prompt_token_ids)
        self._answers += [
            _Answer(
                request, choice, list(prompt), Detokenizer(self.tokenizer, prompt, request.params)
            )
            for choice in range(request.params.n)
        ]
        self._publish(0)

    def explanation(self, request_id: str):
        """Of every request that is known by its id."""
        if self.last_request is None or self.last_request.request_id != request_id:
            return None
        return {"request_id": request_id, "key_name": self.last_request.key_name, "answers": []}

    def abort(self, request_id: str) -> list[TokenEvent]:
        ended = [a for a in self._answers if a.request.request_id == request_id]
        self._answers = [a for a in self._answers if a not in ended]
        self.num_aborted += bool(ended)
        self._publish(0)
        return [self._event(a, (), a.detokenizer.flush(), "abort", None, None) for a in ended]

    def picture(self) -> EnginePicture:
        """Every answer holds one page."""
        self.num_pictures += 1
        cells, told = bytearray([NULL]), list[SequencePicture]()
        for answer in self._answers:
            request, owner = answer.request, FIRST_OWNER + len(told)
            cells.append(owner)
            counts = (len(request.prompt_token_ids), 0, 0, answer.num_new, request.max_tokens, 0)
            name = request.request_id, request.key_name, answer.choice
            told.append(SequencePicture(*name, "running", owner, 1, *counts, 0.0))
        cells += bytes([CACHED]) * 3 + bytes([BLANK]) * (self.num_pages - len(cells) - 3)
        return EnginePicture(
            bytes(cells), 16, told, self.metrics.load, "line", self.num_steps, 0, 0, 0.0
        )

    def step(self) -> list[TokenEvent]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        self.metrics.step_started(len(self._answers))
        events = [self._advance(answer) for answer in self._answers]
        done = {(e.request_id, e.choice) for e in events if e.finish_reason is not None}
        self._answers = [a for a in self._answers if (a.request.request_id, a.choice) not in done]
        self.last_progress_time = time.monotonic()
        self._publish(sum(len(event.token_ids) for event in events))
        return events

    def follow(self, token: int) -> int:
        return self.successors.get(token, (token + 1) % VOCAB)

    def _advance(self, answer: _Answer) -> TokenEvent:
        request, params = answer.request, answer.request.params
        prompt_logprobs = None
        if answer.num_new == 0 and params.prompt_logprobs is not None:
            prompt = request.prompt_token_ids
            scored = pairwise(prompt)
            places = [self._score(a, b, params.prompt_logprobs) for a, b in scored]
            prompt_logprobs = (None, *places)
        if request.max_tokens == 0:
            return self._event(answer, (), "", "length", None, prompt_logprobs)
        last = answer.token_ids[-1]
        token = self._pick(answer, last)
        answer.token_ids.append(token)
        answer.num_new += 1
        reason, stopped_by = None, None
        if answer.num_new > params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                reason = "stop"
            elif token in params.stop_token_ids:
                reason, stopped_by = "stop", token
        silent = reason == "stop" and not params.include_stop_str_in_output
        text, stop = answer.detokenizer.push([token], silent_last=silent)
        if stop is not None:
            reason, stopped_by = "stop", stop
        elif reason is None and answer.num_new >= request.max_tokens:
            reason = "length"
        if reason is not None and stop is None:
            text += answer.detokenizer.flush()
        logprobs = None
        if params.logprobs is not None:
            logprobs = (self._score(last, token, params.logprobs, params.logprob_token_ids),)
        event = self._event(answer, (token,), text, reason, logprobs, prompt_logprobs)
        return event if stopped_by is None else _with_stop(event, stopped_by)

    def _pick(self, answer: _Answer, last: int) -> int:
        if self.script:
            return [*byte_ids(self.script), EOS][answer.num_new]
        biases = answer.request.params.logit_bias or {}
        following = self.follow(last)
        if answer.request.params.temperature > 0:
            key = f"{answer.request.seed} {answer.choice} {len(answer.token_ids)}"
            return random.Random(key).choice([following, self.follow(following)])
        return self.follow(following) if biases.get(following, 0) <= -100 else following

    def _score(self, last: int, token: int, wanted: int, named=None) -> TokenLogprobs:
        following = self.follow(last)
        likeliest = [following, self.follow(following), 0, 1, 2][: max(wanted, 3)]
        scores = {following: NEXT, self.follow(following): AFTER_NEXT}
        rank = likeliest.index(token) + 1 if token in likeliest else 4
        tops = likeliest[:wanted] if named is None else named
        return TokenLogprobs(
            token,
            scores.get(token, REST),
            rank,
            tuple(tops),
            tuple(scores.get(top, REST) for top in tops),
        )

    def _event(
        self, answer: _Answer, token_ids, text, reason, logprobs, prompt_logprobs
    ) -> TokenEvent:
        return TokenEvent(
            request_id=answer.request.request_id,
            choice=answer.choice,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=None,
            num_cached_tokens=0,
            cumulative_logprob=NEXT * answer.num_new,
            times=None if reason is None else times_of(answer.num_new),
        )

    def publish_load(self) -> None:
        self._publish(0)

    def _publish(self, num_new: int) -> None:
        load = EngineLoad(len(self._answers), 0, 0.0, 0, 0, 0, 0)
        self.metrics.step_ended(num_new, load)


def parts_without_device(engine: Any, inputs: InputProcessor, config: EngineConfig) -> EngineParts:
    """What AsyncLLM needs round an engine that computes nothing, and a plan for no device."""
    model = ModelConfig(
        family="successor",
        vocab=inputs.vocab,
        embed=8,
        ffn=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        layer_kinds=(LayerKind(None, RopeConfig(1e4)),),
        max_len=inputs.max_len,
        norm_eps=1e-6,
    )
    return EngineParts(
        engine=engine,
        inputs=inputs,
        tokenizer=inputs.tokenizer,
        template=None,
        model=model,
        config=config,
        default_sampling={},
        phases_s={},
        plan=plan_memory(config, model, 0, np.dtype(np.float32), DeviceMemory("CPU", 2**30, True)),
    )


def _with_stop(event: TokenEvent, stopped_by: int | str) -> TokenEvent:
    return event._replace(stop_reason=stopped_by)


def fake_llm(
    folder: Path,
    *,
    emoji: bool = False,
    max_len: int = 2048,
    template: str | None = "{{ messages[-1]['content'] }}",
    names: tuple[str, ...] = ("S",),
    default_sampling: dict[str, Any] | None = None,
    max_num_queued_reqs: int | None = None,
    max_num_queued_tokens: int | None = None,
    adds_bos: bool = False,
    script: str = "",
    model_settings: dict[str, Any] | None = None,
) -> tuple[AsyncLLM, FakeEngine]:
    """An AsyncLLM over the successor model; its tokenizer's files are written to `folder`."""
    write_tokenizer(folder, adds_bos=adds_bos)
    tokenizer = load_tokenizer(folder)
    metrics = EngineMetrics(names[0], max_len)
    ring = dict(zip(EMOJI_RING, EMOJI_RING[1:] + EMOJI_RING[:1], strict=True))
    engine: Any = FakeEngine(tokenizer, metrics, ring if emoji else {}, script)
    config = EngineConfig(
        model=ModelSettings(model=str(folder), served_model_name=names, **(model_settings or {})),
        scheduler=SchedulerSettings(
            max_num_queued_reqs=max_num_queued_reqs, max_num_queued_tokens=max_num_queued_tokens
        ),
    )
    inputs = InputProcessor(tokenizer, VOCAB, max_len, 0, ())
    parts = parts_without_device(engine, inputs, config)
    parts = replace(
        parts,
        template=None if template is None else ChatTemplate(template, tokenizer.special_tokens),
        default_sampling=default_sampling or {},
    )
    return AsyncLLM(parts), engine
