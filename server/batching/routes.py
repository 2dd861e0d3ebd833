"""How files and batches become part of an application."""

from pathlib import Path
from typing import Protocol

from aiohttp import web

from jaxpaged.engine.served import ServedEngine
from server.auth import KeyGuard
from server.batching import batches, files
from server.batching.requests import RUNNER
from server.batching.runner import BatchRunner
from server.batching.store import BatchStore
from server.limits import NO_LIMITS, Limits
from server.state import SERVER, ServerLimits

UNPLANNED = 64  # rows of an engine that no planner has sized


class Router(Protocol):
    def add_resource(self, path: str, *, name: str) -> web.Resource: ...


def add_batch_routes(router: Router) -> None:
    many = router.add_resource("/v1/files", name="files")
    many.add_route("POST", files.upload)
    many.add_route("GET", files.listed)
    one = router.add_resource("/v1/files/{file_id}", name="file")
    one.add_route("GET", files.retrieve)
    one.add_route("DELETE", files.delete)
    content = router.add_resource("/v1/files/{file_id}/content", name="file_content")
    content.add_route("GET", files.content)
    many = router.add_resource("/v1/batches", name="batches")
    many.add_route("POST", batches.create)
    many.add_route("GET", batches.listed)
    one = router.add_resource("/v1/batches/{batch_id}", name="batch")
    one.add_route("GET", batches.retrieve)
    cancel = router.add_resource("/v1/batches/{batch_id}/cancel", name="cancel_batch")
    cancel.add_route("POST", batches.cancel)


def open_store(limits: ServerLimits) -> BatchStore | None:
    """The store that `--batch-dir` names.

    Raises:
        ConfigError: it cannot be used, or another server uses it.
    """
    if limits.batch_dir is None:
        return None
    return BatchStore(
        Path(limits.batch_dir), limits.max_batch_file_bytes, limits.max_batch_key_bytes
    )


def default_inflight(engine: ServedEngine) -> int:
    """Lines at a time that leave live requests a quarter of the rows."""
    rows = (engine.config.scheduler.max_num_seqs or UNPLANNED) * max(1, len(engine.replicas()))
    return max(1, rows * 3 // 4)


def run_batches(app: web.Application, store: BatchStore, keys: KeyGuard) -> None:
    """Answer batches as long as the application lives."""

    def limits_of(key_id: str) -> Limits | None:
        if keys.is_open or not key_id:
            return NO_LIMITS
        key = keys.key_of(key_id)
        return None if key is None else key.limits

    server = app[SERVER]
    max_inflight = server.limits.max_batch_inflight or default_inflight(server.engine)
    runner = app[RUNNER] = BatchRunner(store, server, limits_of, max_inflight)

    async def start(_app: web.Application) -> None:
        await runner.start()

    async def stop(_app: web.Application) -> None:
        await runner.close()

    async def close(_app: web.Application) -> None:
        store.close()

    app.on_startup.append(start)
    app.on_shutdown.append(stop)
    app.on_cleanup.append(close)
