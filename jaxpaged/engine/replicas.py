"""`ReplicaSet`: several engines' processes, served as if they were one.

Every request goes to one replica (`core/router.py` says to which), what an operator asks goes to
all of them. A replica that dies or hangs costs the answers that it had begun; requests that it had
not begun to answer go to another one, once. The others answer on, and it is started again.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged.config.settings import EngineConfig, ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Pin, Request
from jaxpaged.engine.dispatcher import Dispatcher
from jaxpaged.engine.engine_process import with_place
from jaxpaged.engine.inbox import EventSink, Sinks
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.engine.picture import EnginePicture, join_pictures
from jaxpaged.engine.remote import (
    WORKER,
    FrontTexts,
    Order,
    RemoteLLM,
    load_texts,
    replica_config,
)
from jaxpaged.engine.replica import Replica, ReplicaPolicy
from jaxpaged.engine.replica_metrics import ReplicaMetrics, merge_texts
from jaxpaged.engine.served import ReplicaStatus, ServedEngine
from jaxpaged.engine.wire import Start
from jaxpaged.errors import EngineStopped, RequestError
from jaxpaged.metrics import EngineLoad

ANSWER_S = 2.0  # for a replica to say how it fares


class ReplicaSet(ServedEngine):
    """Serves many callers of one event loop, in which it is made and used."""

    def __init__(self, config: EngineConfig, texts: FrontTexts, replicas: list[Replica]):
        first = replicas[0].llm
        inputs = InputProcessor(texts.tokenizer, first.vocab, first.max_model_len, 0, ())
        super().__init__(inputs, texts.template, Sinks())
        self._config, self._replicas = config, replicas
        self._seeds = itertools.count(config.model.seed)  # no two replicas may draw the same
        self._sleep_level = 0
        engines = [config.parallel.data_parallel_rank + r.index for r in replicas]
        self._metrics = ReplicaMetrics(self.served_model_names[0], engines)
        self._dispatcher = Dispatcher(replicas, config.cache, self._metrics)
        self._loop = asyncio.get_running_loop()
        self._tasks = {self._loop.create_task(replica.keep(self._refill)) for replica in replicas}

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        show_progress: bool = False,
        module: str = WORKER,
        policy: ReplicaPolicy | None = None,
    ) -> "ReplicaSet":
        """Start all processes at once and wait until each has loaded its model.

        Raises:
            ConfigError, WeightsError: as the loading itself, by any of them; none is left then.
            EngineStopped: a process ended without a word.
        """
        config = await with_place(config)
        texts = asyncio.create_task(load_texts(config))
        starts = [
            Start(replica_config(config, index), log_level, show_progress and index == 0)
            for index in range(config.parallel.data_parallel_size)
        ]
        policy = policy or ReplicaPolicy()
        limit_s = policy.startup_timeout_s
        begin = [partial(RemoteLLM.open, s, texts, module, startup_s=limit_s) for s in starts]
        begun: dict[int, RemoteLLM] = {}

        async def begin_one(index: int) -> None:
            begun[index] = await begin[index]()

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(begin)):
                    group.create_task(begin_one(index))
        except BaseExceptionGroup as errors:
            for llm in begun.values():
                llm.close()
            raise errors.exceptions[0] from None
        replicas = [Replica(i, one, policy, begun[i]) for i, one in enumerate(begin)]
        return cls(config, await texts, replicas)

    @property
    def load(self) -> EngineLoad:
        """The sums over all that run; of the pages' use the mean."""
        return total_load([replica.llm.load for replica in self._dispatcher.running()])

    @property
    def vocab(self) -> int:
        """Width of the logits: the bound of token ids."""
        return self._replicas[0].llm.vocab

    @property
    def max_model_len(self) -> int:
        return min(replica.llm.max_model_len for replica in self._replicas)

    @property
    def model_settings(self) -> ModelSettings:
        return self._replicas[0].llm.model_settings

    @property
    def config(self) -> EngineConfig:
        """The settings of the first replica with what the planner filled in."""
        return self._replicas[0].llm.config

    @property
    def is_running(self) -> bool:
        """One replica is enough."""
        return bool(self._dispatcher.running())

    @property
    def seconds_without_progress(self) -> float:
        """Of the one that fares best."""
        times = [replica.llm.seconds_without_progress for replica in self._dispatcher.running()]
        return min(times, default=0.0)

    def replicas(self) -> list[ReplicaStatus]:
        """How each replica fares."""
        return [
            ReplicaStatus(
                replica.index,
                "restarting" if replica.state == "ready" and not replica.is_running
                else replica.state,
                replica.llm.seconds_without_progress if replica.is_running else 0.0,
                replica.num_restarts,
            )
            for replica in self._replicas
        ]  # fmt: skip

    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields that the model or the operator sets, by name."""
        return self._replicas[0].llm.default_sampling()

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format; one that does not answer in time is left out."""
        for replica, up in zip(self._replicas, self._metrics.up, strict=True):
            up.set(replica.is_running)
        texts = await self._ask(lambda llm: llm.metrics_text())
        return merge_texts([*texts, self._metrics.text()])

    async def explanation(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request, as `AsyncLLM.explanation` tells it."""
        found = await self._ask(lambda llm: llm.explanation(request_id))
        return found[0] if found else None

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

        One with a pin goes to all replicas. The caller must `release` it, whatever happens.
        """
        text, ids = await self._encoded(prompt, sampling_params)
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._sinks:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id")
        params = sampling_params
        if params.seed is None:
            params = dataclasses.replace(params, seed=next(self._seeds))
        order = Order(request_id, ids, params, priority, cache_salt, key_name, pin)
        self._sinks[request_id] = sink
        try:
            request = await self._dispatcher.place(order, sink)
        except BaseException:
            self.release(request_id, is_finished=False)
            raise
        return request, text

    def release(self, request_id: str, *, is_finished: bool) -> None:
        """Forget a request that was submitted; one that has not finished is aborted."""
        self._sinks.pop(request_id, None)
        self._dispatcher.release(request_id, is_finished=is_finished)

    async def _abort(self, request_id: str) -> None:
        await self._dispatcher.abort(request_id)

    async def control(self, method: str, *arguments: Any) -> Any:
        """A method of `EngineControl` on every replica; of several answers one is made.

        Raises:
            RequestError: one of them refuses; a sleep is taken back then.
        """
        if method == "sleep" and self._sinks:
            raise RequestError("sleep: requests are running; let them end or abort them first")
        answers = await self._on_all(method, arguments)
        refusals = [answer for answer in answers if isinstance(answer, RequestError)]
        if refusals:
            if method == "sleep":
                await self._on_all("wake_up", ())
            raise refusals[0]
        given = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not given:
            raise next(iter(answers), EngineStopped("no replica is running"))
        self._remember(method, arguments)
        if method == "warm_prefixes":
            return list({prefix["id"]: prefix for answer in given for prefix in answer}.values())
        if method == "picture":
            pictures = [msgspec.convert(answer, EnginePicture) for answer in given]
            return join_pictures(pictures, total_load([picture.load for picture in pictures]))
        return any(given) if method in ("drop_prefix", "is_sleeping") else None

    def give_up(self, reason: str) -> None:
        """Fail all that is open, and have every process write its stacks to stderr, then end."""
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas:
            replica.llm.give_up(reason)

    def close(self) -> None:
        """End all processes; by force where one does not end itself. Called from any thread."""
        for task in self._tasks:
            self._loop.call_soon_threadsafe(task.cancel)
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            list(pool.map(lambda replica: replica.llm.close(), self._replicas))

    async def _ask[T](self, question: Callable[[RemoteLLM], Coroutine[Any, Any, T]]) -> list[T]:
        """What the running replicas say in time; None and silence are left out."""

        async def one(replica: Replica) -> T | None:
            with contextlib.suppress(TimeoutError, EngineStopped):
                async with asyncio.timeout(ANSWER_S):
                    return await question(replica.llm)

        answers = await asyncio.gather(*[one(replica) for replica in self._dispatcher.running()])
        return [answer for answer in answers if answer is not None]

    async def _on_all(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Answers and errors of all replicas that run; a profile has a folder of each."""

        def of(index: int) -> tuple[Any, ...]:
            if method != "start_profile":
                return arguments
            return (str(Path(arguments[0]) / f"engine_{index}"),)

        return await asyncio.gather(
            *[
                replica.llm.control(method, *of(replica.index))
                for replica in self._dispatcher.running()
            ],
            return_exceptions=True,
        )

    def _remember(self, method: str, arguments: tuple[Any, ...]) -> None:
        """What a replica that comes back later must be told, and what no cache holds now."""
        if method in ("sleep", "wake_up"):
            self._sleep_level = arguments[0] if method == "sleep" else 0
        if method in ("sleep", "reset_prefix_cache"):
            self._dispatcher.caches_are_empty()
        if method == "drop_prefix":
            self._dispatcher.forget_pin(arguments[0])

    async def _refill(self, replica: Replica) -> None:
        self._metrics.restarts[replica.index].inc()
        await self._dispatcher.refill(replica)
        if self._sleep_level:
            await replica.llm.control("sleep", self._sleep_level)


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Sums of counts, and the mean share of pages that are held."""
    names = [f.name for f in dataclasses.fields(EngineLoad)]
    total: dict[str, Any] = {name: sum(getattr(load, name) for load in loads) for name in names}
    total["kv_cache_usage"] /= max(1, len(loads))
    return EngineLoad(**total)
