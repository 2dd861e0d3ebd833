"""What the handlers share: the engine, the limits, and whether new work is taken."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import Draining, OutOfTime, RequestError
from jaxpaged.openai.chat import ChatForm
from jaxpaged.openai.chunks import Usage
from jaxpaged.openai.job import Job
from jaxpaged.openai.schema import SamplingFields, StreamOptions
from server.auth import KEY
from server.deadlines import Connections
from server.errors import HttpError
from server.http_metrics import HttpMetrics
from server.limits import ALL, NO_LIMITS, Limits, RateLimits
from server.request_log import log_job
from server.turns import Turns

RETRY_AFTER_S = 5.0
LOOK_AGAIN_S = 0.2
LATE_BODY_S = 2.0  # for bodies to arrive once the server drains
UNLOGGED_PATHS = frozenset({"/health", "/ping", "/metrics", "/v1/engine/state"})


@dataclass(frozen=True)
class ServerLimits:
    """What the operator allows. Sizes in bytes, times in seconds."""

    max_request_bytes: int = 32 * 2**20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    max_connections: int = 4096
    max_waiting_bytes: int = 2**29  # of all bodies that are arriving
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    watchdog_timeout_s: float = 120.0
    startup_timeout_s: float = 3600.0  # for an engine to load its model
    requests_per_minute: int | None = None  # of all clients together
    tokens_per_minute: int | None = None
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    profile_dir: str | None = None
    is_logging_access: bool = True
    has_ui: bool = True  # the web page at /
    unlogged_paths: frozenset[str] = UNLOGGED_PATHS
    warm_prefix_share: float = 0.25  # of the pages that may be pinned, for one key but an admin's
    forces_usage: bool = False  # at the end of every stream
    tells_times: bool = True  # as `metrics` of answers
    names_requests: bool = False  # X-Request-Id also where the client sent none
    batch_dir: str | None = None
    max_batch_file_bytes: int = 200 * 2**20
    max_batch_key_bytes: int = 10 * 2**30
    max_batch_inflight: int | None = None  # lines; three quarters of the rows
    stream_interval: int = 1  # tokens a chunk, where a request says nothing
    sse_keep_alive_s: float = 0.0  # of silence in a stream before a comment; 0: none is sent
    is_logging_requests: bool = False
    max_log_len: int | None = None  # characters and token ids of a prompt in the log; None: all
    tells_tokenizer: bool = False  # at /tokenizer_info


@dataclass
class ServerState:
    """Owned by the event loop."""

    engine: ServedEngine
    limits: ServerLimits = field(default_factory=ServerLimits)
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    pooling: ServedPooling | None = None  # of a second model, or the only one
    is_draining: bool = False
    num_working: int = 0
    num_waiting_bytes: int = 0  # of bodies that are not whole yet
    arriving: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])  # of these bodies
    open_ids: set[str] = field(default_factory=set[str])  # the engine's, of requests being answered
    open_jobs: list[Job] = field(default_factory=list[Job])
    turns: Turns = field(default_factory=Turns)  # of requests that are read
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        ours = self.limits
        self.connections = Connections(
            ours.header_timeout_s, ours.write_timeout_s, ours.max_connections
        )
        limits = Limits(self.limits.requests_per_minute, self.limits.tokens_per_minute)
        self.rates = RateLimits(limits)

    @contextmanager
    def work(self, request: web.Request) -> Generator[Usage]:
        """One request for the engine, from its first byte to its last; the key pays its usage.

        Raises:
            Draining: the server shuts down.
            RateLimited: the key, or all clients together, have used up their minute.
        """
        if self.is_draining:
            raise shutting_down()
        payer = payer_of(request)
        self.rates.admit(*payer)
        self.num_working += 1
        self._idle.clear()
        usage = request[USAGE] = Usage(tells_times=self.limits.tells_times)
        try:
            yield usage
        finally:
            self.rates.charge(usage.total_tokens, *payer)
            self.num_working -= 1
            if not self.num_working:
                self._idle.set()

    @contextmanager
    def open(self, job: Job, kind: str, *, streams: bool) -> Generator[None]:
        """While a job is answered the engine's ids of it are known, so that it can be ended.

        `kind` and `streams`, the endpoint and how the client wants the answer, are for metrics.
        """
        if self.limits.is_logging_requests:
            log_job(job, kind, self.limits.max_log_len)
        self.open_ids.update(job.request_ids)
        self.open_jobs.append(job)
        seconds, timer = job.body.timeout_s, None
        if seconds is not None:
            timer = asyncio.create_task(self._end_in_time(job, seconds))
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self.open_ids.difference_update(job.request_ids)
            self.open_jobs.remove(job)
            self._note_calls(job, kind, "streaming" if streams else "non_streaming")

    def _note_calls(self, job: Job, kind: str, mode: str) -> None:
        """Tell the metrics what tool parsers found."""
        readings = job.form.tool_readings if isinstance(job.form, ChatForm) else ()
        for reading in readings:
            self.metrics.answer_parsed(job.envelope.model, mode, kind, reading)

    @contextmanager
    def open_id(self, request_id: str) -> Generator[str]:
        """While a request without a job runs the engine's id of it is known, likewise."""
        self.open_ids.add(request_id)
        try:
            yield request_id
        finally:
            self.open_ids.discard(request_id)

    async def _end_in_time(self, job: Job, seconds: float) -> None:
        await asyncio.sleep(seconds)
        error = OutOfTime(f"timeout_s of {seconds:g} s has passed")
        while True:  # what has not reached the engine yet is looked at again
            for request_id in job.request_ids:
                self.engine.fail(request_id, error)
            await asyncio.sleep(LOOK_AGAIN_S)

    def drain(self) -> None:
        """Take no new work; bodies that are not whole have little time left."""
        self.is_draining = True
        seconds = min(LATE_BODY_S, self.limits.shutdown_timeout_s)
        end = asyncio.get_running_loop().time() + seconds
        for deadline in self.arriving:
            deadline.reschedule(min(end, deadline.when() or end))

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """True once no work is left, False after `timeout_s`."""
        if not self.num_working:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def check_model(self, name: str | None) -> str:
        """The name to answer under.

        Raises:
            HttpError: a model that is not served here, 404.
        """
        served = self.engine.served_model_names
        if not name and served:
            return served[0]
        if name and name in served:
            return name
        if not name or name in self._pooling_names:
            raise RequestError(
                f"the model {name or self._pooling_names[0]!r} does not generate: it is served for "
                "/v1/embeddings, /score and /rerank",
                param="model",
            )
        raise _no_such_model(name)

    def pooling_for(self, name: str | None, what: str) -> tuple[ServedPooling, str]:
        """The engine that embeds under this name, and the name to answer under.

        Raises:
            RequestError: the model generates and does not give `what`.
            HttpError: a model that is not served here, 404.
        """
        if self.pooling is not None and (not name or name in self._pooling_names):
            return self.pooling, name or self._pooling_names[0]
        if not name or name in self.engine.served_model_names:
            others = "".join(f"; {other!r} does" for other in self._pooling_names[:1])
            raise RequestError(
                f"the model {name or self.engine.served_model_names[0]!r} does not support "
                f"{what}{others or ': start with --embedding-model'}",
                param="model",
            )
        raise _no_such_model(name)

    @property
    def _pooling_names(self) -> tuple[str, ...]:
        return () if self.pooling is None else self.pooling.served_model_names

    @property
    def engines(self) -> tuple[ServedEngine | ServedPooling, ...]:
        return (self.engine,) if self.pooling is None else (self.engine, self.pooling)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that a request may give."""
        return tuple(name for engine in self.engines for name in engine.served_model_names)

    @property
    def is_running(self) -> bool:
        """Every engine that was started is there."""
        return all(engine.is_running for engine in self.engines)

    @property
    def seconds_without_progress(self) -> float:
        """Of the engine that fares worst."""
        return max(engine.seconds_without_progress for engine in self.engines)

    def engine_of(self, name: str | None) -> ServedEngine | ServedPooling:
        """The engine of a model, whatever it is for; without a name the first one.

        Raises:
            HttpError: a model that is not served here, 404.
        """
        if name and name not in self.model_names:
            raise _no_such_model(name)
        has_it = (engine for engine in self.engines if name in engine.served_model_names)
        return next(has_it, self.engine)


def _no_such_model(name: str) -> HttpError:
    return HttpError(
        404,
        f"the model {name[:200]!r} does not exist; GET /v1/models lists what is served",
        code="model_not_found",
        param="model",
    )


SERVER = web.AppKey("server", ServerState)
USAGE = web.RequestKey("usage", Usage)


def shutting_down() -> Draining:
    return Draining("the server is shutting down", retry_after_s=RETRY_AFTER_S)


def payer_of(request: web.Request) -> tuple[str, Limits]:
    """Whose limits a request counts against, beside everybody's."""
    key = request.get(KEY)
    return (ALL, NO_LIMITS) if key is None else (key.key_id, key.limits)


def apply_defaults(body: SamplingFields, limits: ServerLimits) -> None:
    """What the operator wants of every request."""
    if limits.forces_usage and body.stream:
        options = body.stream_options or StreamOptions()
        options.include_usage = True
        body.stream_options = options
    if limits.stream_interval > 1 and body.stream_interval is None:
        body.stream_interval = limits.stream_interval
