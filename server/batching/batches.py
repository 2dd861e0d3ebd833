"""/v1/batches: files of requests, answered when there is room."""

import re
import time
import uuid

import msgspec
from aiohttp import web

from jaxpaged.errors import RequestError
from jaxpaged.openai.schema import decode_body
from server.auth import KEY_ID
from server.batching.answers import ENDPOINTS
from server.batching.records import Batch
from server.batching.requests import (
    BatchRequest,
    id_of,
    json,
    owner_of,
    runner_of,
    store_of,
    unknown,
)
from server.batching.store import done_anyway
from server.bodies import read_body
from server.paging import page_asked, page_of
from server.state import SERVER

MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512  # of metadata
MAX_WINDOW_S = 30 * 86_400
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

_BATCH = msgspec.json.Decoder(BatchRequest)


async def create(request: web.Request) -> web.Response:
    runner, server = runner_of(request), request.app[SERVER]
    with server.work(request):
        body = decode_body(await read_body(request), _BATCH)
        batch = _batch(body, request[KEY_ID])
        await done_anyway(runner.create(batch, owner_of(request)))
    return json(batch.fields())


async def listed(request: web.Request) -> web.Response:
    store, (after, limit) = store_of(request), page_asked(request)
    found = await store.run(store.db.page, Batch, owner_of(request), after, limit + 1)
    return json(page_of([batch.fields() for batch in found], limit))


async def retrieve(request: web.Request) -> web.Response:
    return json((await _found(request)).fields())


async def cancel(request: web.Request) -> web.Response:
    """Begin to end a batch, and keep what has been answered. A second time changes nothing."""
    runner, batch = runner_of(request), await _found(request)
    batch = await done_anyway(runner.cancel(batch.batch_id))
    if batch.cancelling_at is None:
        raise RequestError(f"the batch is {batch.status}: it cannot be cancelled any more")
    return json(batch.fields())


async def _found(request: web.Request) -> Batch:
    store, batch_id = store_of(request), id_of(request, "batch")
    found = await store.run(store.db.get, Batch, batch_id, owner_of(request))
    if found is None:
        raise unknown("batch", batch_id)
    return found


def _batch(body: BatchRequest, key_id: str) -> Batch:
    if body.endpoint not in ENDPOINTS:
        raise RequestError(
            f"endpoint is {body.endpoint[:100]!r}, served are {', '.join(ENDPOINTS)}",
            param="endpoint",
        )
    kept = body.output_expires_after
    now, metadata = int(time.time()), body.metadata or {}
    pairs = metadata.items()
    if len(pairs) > MAX_PAIRS or any(len(k) > MAX_NAME or len(v) > MAX_VALUE for k, v in pairs):
        raise RequestError(
            f"metadata may have {MAX_PAIRS} pairs, of {MAX_NAME} and {MAX_VALUE} characters",
            param="metadata",
        )
    return Batch(
        batch_id=f"batch_{uuid.uuid4().hex}",
        key_id=key_id,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=msgspec.json.encode(metadata).decode(),
        created_at=now,
        expires_at=now + _window_s(body.completion_window),
        output_id=f"file-{uuid.uuid4().hex}",
        error_id=f"file-{uuid.uuid4().hex}",
        output_expires_s=None if kept is None else kept.checked("output_expires_after"),
    )


def _window_s(window: str) -> int:
    """Seconds of `24h` and the like."""
    found = re.fullmatch(r"([0-9]{1,7})([smhd])", window)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise RequestError(
            f"completion_window is {window[:40]!r}: write 24h, or a number with s, m, h or d of "
            "up to 30d",
            param="completion_window",
        )
    return seconds
