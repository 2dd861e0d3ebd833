"""`python -m server MODEL` and `jaxpaged serve MODEL`."""

import asyncio
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxpaged.config.flags import config_from_args
from jaxpaged.config.pooling import leave_room, share_devices
from jaxpaged.config.settings import EngineConfig
from jaxpaged.engine.collector import calm_collector
from jaxpaged.engine.pooling.alone import NoGeneration
from jaxpaged.engine.pooling.model_files import resolved_runner
from jaxpaged.engine.pooling.remote import RemotePooling
from jaxpaged.engine.pooling.served import ServedPooling
from jaxpaged.engine.remote import WORKER, RemoteLLM
from jaxpaged.engine.replica import ReplicaPolicy
from jaxpaged.engine.replicas import ReplicaSet
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import ConfigError, JaxPagedError
from server.app import create_app
from server.batching.routes import open_store
from server.batching.store import BatchStore
from server.fingerprint import system_fingerprint
from server.flags import make_parser
from server.serving import bind, close_engine, serve
from server.settings import ServerSettings, parse, server_settings

EXIT_SETTINGS = 2


def main(
    argv: Sequence[str] | None = None, prog: str = "jaxpaged serve", worker: str = WORKER
) -> int:
    """Load the model, serve it, and return the exit code: 2 for a setting that cannot work.

    `worker` is the module that the engine's process runs.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv, prog, worker)
    except JaxPagedError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_SETTINGS


def _run(argv: Sequence[str], prog: str, worker: str) -> int:
    args = parse(make_parser(prog), argv)
    config, settings = config_from_args(args), server_settings(args)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every device it lacks
    with ExitStack() as open_sockets:
        listening, metrics = open_sockets.enter_context(bind(settings)), None
        if settings.metrics_port is not None:
            at_port = dataclasses.replace(settings, port=settings.metrics_port, uds=None)
            metrics = open_sockets.enter_context(bind(at_port))
        store = open_store(settings.limits)
        code = asyncio.run(_serve(config, settings, listening, metrics, worker, store))
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)
    return code


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    listening: socket.socket,
    metrics_listening: socket.socket | None,
    worker: str,
    store: BatchStore | None,
) -> int:
    engines: list[ServedEngine | ServedPooling] = []
    try:
        pooling = await _start_pooling(config, settings)
        if pooling is not None:
            engines.append(pooling)
        if pooling is not None and settings.embedding is None:
            engine: ServedEngine = NoGeneration(pooling)
        else:
            if pooling is not None and share_devices(config, pooling.config):
                config = leave_room(config, pooling.device_share)
            engine = await _start(config, settings, worker)
            engines.append(engine)
        engine.fingerprint = system_fingerprint(config, *settings.fingerprint)
        engine.named_model = config.model.model
        if pooling is not None:
            pooling.named_model = (settings.embedding or config).model.model
        app = create_app(
            engine, settings.api_keys, settings.limits, store, pooling, settings.middlewares
        )
        calm_collector()
        code = await serve(app, listening, settings, metrics_listening)
    finally:
        closed = [await asyncio.to_thread(close_engine, engine) for engine in engines]
    if not all(closed):
        logging.shutdown()
        os._exit(code)  # a thread that never returns would hold the process
    return code


async def _start_pooling(config: EngineConfig, settings: ServerSettings) -> ServedPooling | None:
    """The engine of the model that embeds, if there is one: the first model or a second."""
    embedding = settings.embedding
    if await asyncio.to_thread(resolved_runner, config.model) == "pooling":
        if embedding is not None:
            raise ConfigError(
                f"{config.model.model} embeds, so --embedding-model would be a second one: name "
                "a model that generates first"
            )
        embedding = config
    if embedding is None:
        return None
    if settings.engine_process:
        return await RemotePooling.start(
            embedding,
            log_level=settings.log_level,
            startup_s=settings.limits.startup_timeout_s,
        )
    if not share_devices(config, embedding):
        raise ConfigError(
            "--disable-frontend-multiprocessing keeps both models in one process with the same "
            "devices: leave it out, or device_ids in --embedding-settings"
        )
    from jaxpaged.engine.pooling.threaded import AsyncPooling  # brings JAX

    return AsyncPooling.from_config(embedding)


async def _start(config: EngineConfig, settings: ServerSettings, worker: str) -> ServedEngine:
    """The engine in a process of its own, where parsing and writing HTTP cannot delay its steps."""
    log_level, show_progress = settings.log_level, sys.stderr.isatty()
    if config.parallel.data_parallel_size > 1:
        if not settings.engine_process:
            raise ConfigError(
                "--disable-frontend-multiprocessing keeps the engine in the server's process, "
                "which holds one replica: leave it out, or --data-parallel-size"
            )
        limits = settings.limits
        policy = ReplicaPolicy(limits.watchdog_timeout_s, limits.startup_timeout_s)
        return await ReplicaSet.start(
            config, log_level=log_level, show_progress=show_progress, module=worker, policy=policy
        )
    if settings.engine_process:
        return await RemoteLLM.start(
            config,
            log_level=log_level,
            show_progress=show_progress,
            module=worker,
            startup_s=settings.limits.startup_timeout_s,
        )
    from jaxpaged.engine.async_engine import AsyncLLM  # brings JAX, which takes seconds

    return AsyncLLM.from_config(config, show_progress=show_progress)
