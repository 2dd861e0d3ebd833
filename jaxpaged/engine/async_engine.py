"""`AsyncLLM`: the engine in a thread of its own, its answers as async iterators."""

import asyncio
import functools
import logging
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Pin, Request, TokenEvent
from jaxpaged.engine.advice import ran_out
from jaxpaged.engine.control import EngineControl
from jaxpaged.engine.engine_thread import EngineThread
from jaxpaged.engine.factory import EngineParts, build_engine
from jaxpaged.engine.grammar_rows import compile_grammar
from jaxpaged.engine.inbox import EventSink, Sinks
from jaxpaged.engine.inputs import Prompt
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import (
    CapacityError,
    EngineStopped,
    QueueFull,
    RequestError,
)
from jaxpaged.metrics import EngineLoad, EngineMetrics

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
LONG_PROMPT = 4096  # tokens


class AsyncLLM(ServedEngine):
    """Serves many callers of one event loop. Made outside the loop or in it; used in it."""

    def __init__(self, parts: EngineParts):
        super().__init__(parts.inputs, parts.template, Sinks())
        self._parts, self._engine = parts, parts.engine
        self._arriving: dict[str, int] = {}  # prompt tokens by request, until the engine has them
        self._asked: set[asyncio.Future[Any]] = set()  # controls that wait for their answer
        self._control = EngineControl(parts)
        for state, is_in_it in self._control.sleep_states().items():
            self.metrics.ask("engine_sleep_state", "1 of the state", is_in_it, sleep_state=state)
        # where set, is told a step's events by the engine's thread, instead of the requests' sinks
        self.on_events: Callable[[list[TokenEvent]], None] | None = None
        self._thread = EngineThread(
            "engine",
            parts.engine,
            self._deliver,
            self._fail_all,
            lambda error: ran_out(parts.plan, error),
        )

    @classmethod
    def from_config(cls, config: EngineConfig, *, show_progress: bool = False) -> "AsyncLLM":
        """Load everything and compile every bucket; ready when it returns."""
        return cls(build_engine(config, warm=True, show_progress=show_progress))

    @property
    def parts(self) -> EngineParts:
        return self._parts

    @property
    def config(self) -> EngineConfig:
        """The settings with what the planner filled in."""
        return self._parts.config

    @property
    def metrics(self) -> EngineMetrics:
        return self._engine.metrics

    @property
    def load(self) -> EngineLoad:
        """The engine's state after its last step."""
        return self._engine.metrics.load

    @property
    def vocab(self) -> int:
        """Width of the logits: the bound of token ids."""
        return self._parts.model.vocab

    @property
    def max_model_len(self) -> int:
        return self._parts.model.max_len

    @property
    def model_settings(self) -> ModelSettings:
        return self._parts.config.model

    @property
    def is_running(self) -> bool:
        return self._thread.is_running

    @property
    def seconds_without_progress(self) -> float:
        """Since a step was last read or a program compiled, while there is work; 0 while idle."""
        return self._thread.seconds_without_progress

    async def explanation(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request: an open one, or one of the last that asked to be explained."""
        return self._engine.explanation(request_id)

    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields that the model or the operator sets, by name."""
        return dict(self._parts.default_sampling)

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.metrics.text()

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

        The caller must `release` it, whatever happens. Raises what `generate` raises.
        """
        text, ids = await self._encoded(prompt, sampling_params)
        make_request = functools.partial(
            self._parts.inputs.request,
            ids,
            sampling_params,
            request_id=request_id or uuid.uuid4().hex,
            priority=priority,
            cache_salt=cache_salt,
            key_name=key_name,
            pin=pin,
            grammar=await compile_grammar(self._parts.inputs.grammars, sampling_params),
        )
        if len(ids) < LONG_PROMPT:
            request = make_request()
        else:
            request = await asyncio.to_thread(make_request)  # it hashes every page
        self._check_capacity(len(ids))
        if request.request_id in self._sinks:
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        self._sinks[request.request_id] = sink
        self._arriving[request.request_id] = len(ids)
        self._thread.send(lambda: self._add(request))
        return request, text

    def release(self, request_id: str, *, is_finished: bool) -> None:
        """Forget a request that was submitted; one that has not finished is aborted."""
        self._sinks.pop(request_id, None)
        if not is_finished:
            self._thread.send(lambda: self._engine.abort(request_id))

    async def _abort(self, request_id: str) -> None:
        self._thread.send(lambda: self._deliver(self._engine.abort(request_id)))

    async def control(self, method: str, *arguments: Any) -> Any:
        """A method of `EngineControl`, run by the engine's thread between two steps.

        Raises:
            RequestError: it cannot be done now.
            EngineStopped: nobody is there to do it.
        """
        self._thread.check_running()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.add(future)
        self._thread.send(
            lambda: self._control.answer(method, arguments, future, self._thread.tell)
        )
        try:
            return await future
        finally:
            self._asked.discard(future)

    def give_up(self, reason: str) -> None:
        """Fail all that is open, and write the stacks of all threads to stderr."""
        self._thread.give_up(reason)

    def stop(self) -> None:
        """Stop the thread after its present step; the engine itself can be used again."""
        self._thread.stop()

    def close(self) -> None:
        """Stop the thread after its present step and free the device."""
        self.stop()
        self._engine.runner.close()

    def _check_capacity(self, num_tokens: int) -> None:
        self._thread.check_running()
        self._check_awake()
        settings = self._parts.config.scheduler
        scheduler, arriving = self._engine.scheduler, list(self._arriving.values())
        waiting = scheduler.num_waiting + len(arriving)
        most = settings.max_num_queued_reqs
        if most is not None and waiting >= most:
            self._refuse("max_num_queued_reqs", f"{waiting} requests wait, at most {most} may")
        most = settings.max_num_queued_tokens
        if most is not None:
            queued = scheduler.num_waiting_tokens + sum(arriving)
            if queued + num_tokens > most and waiting:
                text = f"{queued} prompt tokens wait, at most {most} may"
                self._refuse("max_num_queued_tokens", text)

    def _check_awake(self) -> None:
        if self._control.sleeps:
            raise CapacityError("the engine sleeps: POST /wake_up first")

    def _refuse(self, setting: str, text: str) -> NoReturn:
        self.metrics.rejected(setting)
        raise QueueFull(text, retry_after_s=RETRY_AFTER_S)

    def _add(self, request: Request) -> None:
        try:
            self._check_awake()  # again: what was asked before may have put it to sleep
            self._engine.add(request)
        except (RequestError, CapacityError) as error:
            self._thread.tell(lambda error=error: self.fail(request.request_id, error))
        finally:
            del self._arriving[request.request_id]

    def _deliver(self, events: list[TokenEvent]) -> None:
        if events and self.on_events is not None:
            self.on_events(events)
        elif events:
            self._thread.tell(functools.partial(self._sinks.deliver, events))

    def _fail_all(self, stopped: EngineStopped) -> None:
        self._sinks.fail_all(stopped)
        for future in self._asked:
            if not future.done():
                future.set_exception(stopped)
