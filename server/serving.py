"""The life of a server: ready, serving, draining, gone."""

import asyncio
import contextlib
import logging
import re
import signal
import socket
import threading
from collections.abc import Awaitable

from aiohttp import web

from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import ConfigError, Draining, EngineStopped, JaxPagedError
from server.app import create_metrics_app
from server.listener import Listener, address_of
from server.settings import ServerSettings
from server.state import RETRY_AFTER_S, SERVER, ServerState
from server.warmup import warm_up

log = logging.getLogger(__name__)

WATCH_S = 0.25  # between two looks at the engine
LAST_WORDS_S = 2.0  # for answers to say why they end
CLOSE_S = 5.0  # for the engine's thread to end its step
RATES_S = 60.0

EXIT_DONE, EXIT_ENGINE_STOPPED = 0, 1


async def serve(
    app: web.Application,
    listening: socket.socket,
    settings: ServerSettings,
    metrics_listening: socket.socket | None = None,
) -> int:
    """Serve until a signal comes or the engine stops; returns the exit code.

    Raises:
        ConfigError: another process has begun to listen on an address meanwhile.
    """
    state = app[SERVER]
    stop, at_once = _signals()
    if settings.warmup_file is not None:
        await warm_up(state.engine, settings.warmup_file)
    certificates = settings.certificates
    context = None if certificates is None else certificates.context()
    listener = await Listener.start(app, listening, context)
    metrics = await _serve_metrics(state, metrics_listening)
    log.info("serving %s on %s", ", ".join(state.model_names), address_of(listening))
    if not settings.api_keys:
        log.warning("no --api-key: anyone who reaches this address may use it")
    beside = [asyncio.create_task(_tell_rates(state.engine))] if settings.logs_rates else []
    if context is not None and certificates is not None and settings.refreshes_certificates:
        beside.append(asyncio.create_task(certificates.keep_fresh(context)))
    watchdog = _until_hung(state, state.limits.watchdog_timeout_s)
    await _first(stop.wait(), _until_stopped(state), watchdog)
    code = EXIT_DONE
    if stop.is_set() and state.is_running:
        code = await _drain(state, at_once)
    else:
        code = EXIT_ENGINE_STOPPED
        state.drain()
        if state.is_running:
            _give_up(state)
        log.error("the engine has stopped: no request can be served, exiting")
        await state.wait_until_idle(LAST_WORDS_S)
        await _end_open(state, EngineStopped("an engine of this server has stopped"))
    for task in beside:
        task.cancel()
    await listener.close()
    if metrics is not None:
        await metrics.close()
    return code


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first and the second signal to end set."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            loop.add_signal_handler(number, on_signal)
    return stop, at_once


async def _serve_metrics(state: ServerState, listening: socket.socket | None) -> Listener | None:
    if listening is None:
        return None
    return await Listener.start(create_metrics_app(state), listening)


def _give_up(state: ServerState) -> None:
    """Every open request is told; stacks go to stderr, for whoever looks for the cause."""
    seconds = state.seconds_without_progress
    log.error("no step has ended for %.1f s while work waits: giving up; stacks follow", seconds)
    for engine in state.engines:
        engine.give_up("the engine has stopped: no step ended")


async def _drain(state: ServerState, at_once: asyncio.Event) -> int:
    """Let running requests end; those that cannot in time are told so. The exit code."""
    state.drain()
    limit = state.limits.shutdown_timeout_s
    log.info("shutting down: %d requests have %g s to end", state.num_working, limit)
    watchdog = _until_hung(state, state.limits.watchdog_timeout_s)
    idle, stopped = state.wait_until_idle(limit), _until_stopped(state)
    await _first(idle, at_once.wait(), stopped, watchdog)
    if _hangs(state, state.limits.watchdog_timeout_s):
        _give_up(state)
    await _end_open(state, Draining("the server has shut down", retry_after_s=RETRY_AFTER_S))
    return EXIT_DONE if state.is_running else EXIT_ENGINE_STOPPED


async def _end_open(state: ServerState, error: JaxPagedError) -> None:
    """Tell what is still being answered why it ends."""
    if state.num_working:
        log.warning("ending %d requests before they are done", state.num_working)
        for request_id in tuple(state.open_ids):
            state.engine.fail(request_id, error)
        await state.wait_until_idle(LAST_WORDS_S)


def close_engine(engine: ServedEngine | ServedPooling) -> bool:
    """Free the device; False where the engine's thread does not end its step in time."""
    thread = threading.Thread(target=engine.close, name="closing", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    return not thread.is_alive()


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address before the model is loaded; nobody is accepted yet.

    Raises:
        ConfigError: it cannot be taken.
    """
    where = settings.uds or f"{settings.host}:{settings.port}"
    if settings.uds is not None:
        family, address = socket.AF_UNIX, settings.uds
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        address = (settings.host, settings.port)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{where} cannot be listened on: {error.strerror or error}") from None
    return listening


async def _first(*waits: Awaitable[object]) -> None:
    """Wait for the first of several, and drop the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _until_stopped(state: ServerState) -> None:
    while state.is_running:
        await asyncio.sleep(WATCH_S)


async def _until_hung(state: ServerState, limit_s: float) -> None:
    while not _hangs(state, limit_s):
        await asyncio.sleep(WATCH_S)


def _hangs(state: ServerState, limit_s: float) -> bool:
    return state.is_running and state.seconds_without_progress > limit_s


async def _tell_rates(engine: ServedEngine) -> None:
    """One line a minute in which there was something to tell."""
    before = await _tokens(engine)
    with contextlib.suppress(asyncio.CancelledError, EngineStopped):
        while True:
            await asyncio.sleep(RATES_S)
            now, load = await _tokens(engine), engine.load
            if now != before:
                log.info(
                    "prompt %.0f tok/s, output %.0f tok/s, running %d, waiting %d, pages %.0f %%",
                    (now[0] - before[0]) / RATES_S,
                    (now[1] - before[1]) / RATES_S,
                    load.num_running,
                    load.num_waiting,
                    100 * load.kv_cache_usage,
                )
            before = now


async def _tokens(engine: ServedEngine) -> list[float]:
    """Prompt and output tokens since start, of all replicas."""
    text = (await engine.metrics_text()).decode()
    names = ("prompt_tokens", "generation_tokens")
    found = [re.findall(rf"^vllm:{name}_total\S* (\S+)$", text, re.MULTILINE) for name in names]
    return [sum(map(float, values)) for values in found]
