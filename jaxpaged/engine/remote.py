"""`RemoteLLM`: an engine in another process, as `AsyncLLM` is one in another thread.

Text is read and tokenised here; token ids go to the engine, and a step's events come back as one
message. Knows no device and never imports JAX.
"""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NamedTuple

from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Pin, Request
from jaxpaged.engine.engine_process import STARTUP_S, EngineProcess, with_place
from jaxpaged.engine.inbox import EventSink
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.engine.served import ServedEngine
from jaxpaged.engine.texts import template_for, tokenizer_for
from jaxpaged.engine.wire import Release, Start, Submit
from jaxpaged.errors import RequestError
from jaxpaged.metrics import EngineLoad
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import Tokenizer

WORKER = "jaxpaged.engine.worker"
SILENCE_S = 2.0  # without a sign of life before it counts as standing still


class FrontTexts(NamedTuple):
    """What the front needs of a model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


class Order(NamedTuple):
    """All that an engine is told of a request, in the order of `Submit`'s fields."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    key_name: str
    pin: Pin | None


def replica_config(config: EngineConfig, index: int) -> EngineConfig:
    """The configuration of one replica, with devices of its own."""
    return dataclasses.replace(config, parallel=config.parallel.replica(index))


async def load_texts(config: EngineConfig) -> FrontTexts:
    """Read tokenizer and chat template, in a worker thread."""
    model = config.model
    tokenizer = await asyncio.to_thread(tokenizer_for, model, Path(model.model))
    return FrontTexts(tokenizer, template_for(model, tokenizer))


class RemoteLLM(ServedEngine):
    """Serves many callers of one event loop, in which it is made and used."""

    def __init__(self, process: EngineProcess, texts: FrontTexts):
        self._process, self._connection = process, process.connection
        self._ready = ready = process.ready
        inputs = InputProcessor(texts.tokenizer, ready.vocab, ready.max_model_len, 0, ())
        super().__init__(inputs, texts.template, process.connection.sinks)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        show_progress: bool = False,
        module: str = WORKER,
        startup_s: float = STARTUP_S,
    ) -> "RemoteLLM":
        """Start the process and wait until its model is loaded.

        Raises:
            ConfigError, WeightsError: as the loading itself.
            EngineStopped: the process ended without a word.
        """
        config = replica_config(await with_place(config), 0)
        texts = asyncio.create_task(load_texts(config))
        start = Start(config, log_level, show_progress)
        return await cls.open(start, texts, module, startup_s)

    @classmethod
    async def open(
        cls,
        start: Start,
        texts: Awaitable[FrontTexts],
        module: str = WORKER,
        startup_s: float = STARTUP_S,
    ) -> "RemoteLLM":
        """As `start`, of a model whose place is known, and whose texts are being loaded."""
        process, found = await EngineProcess.open(module, start, texts, startup_s)
        return cls(process, found)

    @property
    def load(self) -> EngineLoad:
        """The engine's state after its last step."""
        return self._connection.load or self._ready.load

    @property
    def vocab(self) -> int:
        """Width of the logits: the bound of token ids."""
        return self._ready.vocab

    @property
    def max_model_len(self) -> int:
        return self._ready.max_model_len

    @property
    def config(self) -> EngineConfig:
        """The settings with what the planner filled in."""
        return self._ready.config

    @property
    def model_settings(self) -> ModelSettings:
        return self._ready.config.model

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def seconds_without_progress(self) -> float:
        """Since a step was last read while there is work, or since the process last spoke."""
        connection, now = self._connection, time.monotonic()
        silence = now - connection.heard_at
        if connection.has_work:
            return now - connection.progress_at
        return silence if silence > SILENCE_S else 0.0

    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields that the model or the operator sets, by name."""
        return dict(self._ready.default_sampling)

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return await self._process.call("metrics_text")

    async def explanation(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request, as `AsyncLLM.explanation` tells it."""
        return await self._process.call("explanation", request_id)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        sink: EventSink,
        *,
        priority: int = 0,
        cache_salt: str = "",
        key_name: str = "",
        pin: Pin | None = None,
    ) -> tuple[Request, str | None]:
        """Queue a request whose events go straight to `sink`; returns it and the prompt's text.

        The caller must `release` it, whatever happens.
        """
        text, ids = await self._encoded(prompt, sampling_params)
        order = Order(
            request_id or uuid.uuid4().hex,
            ids,
            sampling_params,
            priority,
            cache_salt,
            key_name,
            pin,
        )
        return await self.submit_order(order, sink), text

    async def submit_order(self, order: Order, sink: EventSink) -> Request:
        """Likewise, of a prompt that is encoded and checked."""
        connection, request_id = self._connection, order.request_id
        if request_id in self._sinks:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id")
        call_id, answer = connection.next_call()
        self._sinks[request_id] = sink
        try:
            connection.send(Submit(call_id, *order))
            max_tokens, seed = await answer
        except BaseException:
            answer.cancel()
            self.release(request_id, is_finished=False)
            raise
        now, none = time.monotonic(), frozenset[int]()
        return Request(
            request_id,
            tuple(order.token_ids),
            order.params,
            max_tokens,
            seed,
            now,
            none,
            order.priority,
        )

    def redirect(self, request_id: str, sink: EventSink) -> None:
        """Send what else comes of a request to another sink."""
        if request_id in self._sinks:
            self._sinks[request_id] = sink

    def release(self, request_id: str, *, is_finished: bool) -> None:
        """Forget a request that was submitted; one that has not finished is aborted."""
        if self._sinks.pop(request_id, None) is not None:
            self._connection.send(Release(request_id, is_finished))

    async def _abort(self, request_id: str) -> None:
        await self._process.call("abort", request_id)

    async def control(self, method: str, *arguments: Any) -> Any:
        """A method of `EngineControl`, done by the engine between two steps."""
        return await self._process.call("control", method, *arguments)

    def give_up(self, reason: str) -> None:
        self._process.give_up(reason)

    def close(self) -> None:
        self._process.close()
