"""/v1/files: what batches read and leave."""

import asyncio
import logging

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from jaxpaged.errors import RequestError
from server.auth import KEY_ID
from server.batching.records import INPUT, StoredFile
from server.batching.requests import ExpiresAfter, id_of, json, owner_of, store_of, unknown
from server.batching.store import Upload, refusing
from server.bodies import arriving
from server.errors import HttpError
from server.paging import order_asked, page_asked, page_of
from server.sse import HIGH_WATER
from server.state import SERVER, ServerState

log = logging.getLogger(__name__)

CHUNK = 2**20  # bytes between two writes to the disk
MAX_FIELD = 1000  # bytes of a field that is no file
MAX_FIELDS = 20
MAX_NAME = 255  # characters


async def upload(request: web.Request) -> web.Response:
    """Take a file in. It streams to the disk; a client that leaves leaves nothing."""
    store, server = store_of(request), request.app[SERVER]
    with server.work(request):
        _check_head(request, store.max_file_bytes)
        await store.run(store.db.check_room, request[KEY_ID], 0, store.max_key_bytes)
        received = store.start_upload(request[KEY_ID])
        try:
            fields, filename = await _read_form(request, received, store.max_file_bytes)
            seconds = _check_fields(fields, filename)
            file = await received.keep(filename or "", seconds)
        finally:
            await received.drop()
    return json(file.fields())


async def listed(request: web.Request) -> web.Response:
    store, (after, limit) = store_of(request), page_asked(request)
    order = order_asked(request)
    purpose = request.query.get("purpose")
    purpose = None if purpose is None else purpose.encode("utf-8", "replace").decode()
    found = await store.run(
        store.db.page, StoredFile, owner_of(request), after, limit + 1, order, purpose
    )
    return json(page_of([file.fields() for file in found], limit))


async def retrieve(request: web.Request) -> web.Response:
    return json((await _file(request)).fields())


async def content(request: web.Request) -> web.StreamResponse:
    """All of a file. A client that reads too little of it is cut, as one of a stream is."""
    file = await _file(request)
    headers = {"Content-Type": "application/jsonl", "Content-Disposition": "attachment"}
    response = web.StreamResponse(headers=headers)
    response.content_length = file.num_bytes
    part = await _part(request, file, 0)
    await response.prepare(request)
    try:
        for start in range(HIGH_WATER, file.num_bytes + HIGH_WATER, HIGH_WATER):
            async with asyncio.timeout(request.app[SERVER].limits.write_timeout_s):
                await response.write(part)
            part = await _part(request, file, start)
    except (TimeoutError, ConnectionError, HttpError) as error:
        log.info("%s was not sent whole: %s", file.file_id, error or "the client does not read")
        if request.transport is not None:  # its length is told: only a cut says that it ends
            request.transport.abort()
    return response


async def _part(request: web.Request, file: StoredFile, start: int) -> bytes:
    """What stands from `start` on. No file stays open while a client reads: many may."""
    path = store_of(request).path(file.file_id)

    def read() -> bytes:
        with path.open("rb") as opened:
            opened.seek(start)
            return opened.read(HIGH_WATER)

    try:
        with refusing():
            return await asyncio.to_thread(read)
    except HttpError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # deleted meanwhile
            raise unknown("file", file.file_id) from None
        raise


async def delete(request: web.Request) -> web.Response:
    file_id = id_of(request, "file")
    if not await store_of(request).delete(file_id, owner_of(request)):
        raise unknown("file", file_id)
    return json({"id": file_id, "object": "file", "deleted": True})


async def _file(request: web.Request) -> StoredFile:
    store, file_id = store_of(request), id_of(request, "file")
    found = await store.run(store.db.get, StoredFile, file_id, owner_of(request))
    if found is None:
        raise unknown("file", file_id)
    return found


def _check_head(request: web.Request, max_bytes: int) -> None:
    if request.content_type != "multipart/form-data":
        raise RequestError("a file is sent as multipart/form-data with the fields purpose and file")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(415, "Content-Encoding is not served: send the body as it is")
    if (request.content_length or 0) > max_bytes + MAX_FIELD * MAX_FIELDS:
        raise _too_large(max_bytes)


async def _read_form(
    request: web.Request, received: Upload, max_bytes: int
) -> tuple[dict[str, str], str | None]:
    """The fields of a form, and the name of the file in it, whose content goes to the disk."""
    fields, filename = dict[str, str](), None
    state = request.app[SERVER]
    try:
        form = await request.multipart()
        for _ in range(MAX_FIELDS):
            async with arriving(state):
                part = await form.next()
            if part is None:
                return fields, filename
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise RequestError("the form has a part without a name")
            if part.name != "file":
                fields[part.name] = await _read_field(part, state)
            elif filename is not None:
                raise RequestError("the form has two files: send one", param="file")
            else:
                filename = part.filename or ""
                await _read_file(part, received, max_bytes, state)
    except TimeoutError:
        seconds = state.limits.body_timeout_s
        raise HttpError(408, f"the file did not come at a MiB in {seconds:g} s") from None
    except (ValueError, HttpProcessingError) as error:
        raise RequestError(f"the form cannot be read: {str(error)[:100]!r}") from None
    raise RequestError(f"the form has over {MAX_FIELDS} parts")


async def _read_field(part: BodyPartReader, state: ServerState) -> str:
    data = b""
    async with arriving(state):
        while chunk := await part.read_chunk():
            data += chunk
            if len(data) > MAX_FIELD:
                raise RequestError(f"{(part.name or '')[:40]} has over {MAX_FIELD} bytes")
    return data.decode("utf-8", "replace")


async def _read_file(
    part: BodyPartReader, received: Upload, max_bytes: int, state: ServerState
) -> None:
    is_whole = False
    while not is_whole:
        data = bytearray()
        async with arriving(state):
            while len(data) < CHUNK and not is_whole:
                chunk = await part.read_chunk(CHUNK)
                data += chunk
                is_whole = not chunk
        if received.num_bytes + len(data) > max_bytes:
            raise _too_large(max_bytes)
        await received.write(bytes(data))


def _check_fields(fields: dict[str, str], filename: str | None) -> int | None:
    """Seconds that the file is kept, if it is not for good."""
    purpose = fields.get("purpose")
    if purpose != INPUT:
        got = "is missing" if purpose is None else f"is {purpose[:40]!r}"
        raise RequestError(f"purpose {got}: only {INPUT!r} is served", param="purpose")
    if filename is None:
        raise RequestError("file is missing", param="file")
    if len(filename) > MAX_NAME:
        raise RequestError(f"the file's name has over {MAX_NAME} characters", param="file")
    if not any(name.startswith("expires_after") for name in fields):
        return None
    anchor, seconds = (fields.get(f"expires_after[{name}]", "") for name in ("anchor", "seconds"))
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 12
    return ExpiresAfter(anchor, int(seconds) if is_number else 0).checked("expires_after")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the file is larger than {max_bytes} bytes, see --max-batch-file-bytes")
