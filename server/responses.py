"""POST /v1/responses, and what may be done with a response that is stored."""

import asyncio
from contextlib import ExitStack, aclosing

from aiohttp import web

from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.errors import RateLimited, RequestError
from jaxpaged.openai.answers import check_output, outputs_of
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.job import Job
from jaxpaged.openai.responses.answer import Fields, ResponseAnswer
from jaxpaged.openai.responses.convert import (
    chat_request,
    input_items,
    input_messages,
    naming_its_fields,
)
from jaxpaged.openai.responses.job import collect, response_job
from jaxpaged.openai.responses.schema import ResponsesRequest, read_responses
from jaxpaged.openai.responses.store import ResponseStore, StoredResponse, Turn, parsed_bytes
from server.answering import stream_outputs
from server.auth import KEY_ID
from server.bodies import read_body
from server.errors import HttpError, error_fields, log_refusal
from server.paging import not_after, order_asked, page_asked, page_of
from server.sse import EventStream
from server.state import RETRY_AFTER_S, SERVER

STORE = web.AppKey("responses", ResponseStore)
MAX_BACKGROUND = 256  # that run at a time, of one key


async def create(request: web.Request) -> web.StreamResponse:
    server, store, key_id = request.app[SERVER], request.app[STORE], request[KEY_ID]
    with ExitStack() as work:
        usage = work.enter_context(server.work(request))
        data = await read_body(request)
        body = read_responses(data)
        model = server.check_model(body.model)
        before = store.turn(body.previous_response_id, key_id)
        history = [] if before is None else before.conversation()
        chat = chat_request(body, history)
        with naming_its_fields(chat):
            asker = {"model": model, "key_id": key_id}
            job, answer = await response_job(body, chat, server.engine, usage, **asker)
            turn = Turn([*input_messages(body.input), answer.message], before)
            items, size = input_items(body.input), parsed_bytes(data)
            stored = StoredResponse(key_id, answer, turn, items, size)
            work.enter_context(server.open(job, "responses", streams=bool(body.stream)))
            if body.background:
                return await _start(request, store, stored, body, job, work.pop_all())
            return await _answer(request, store, stored, body, job)


async def _answer(
    request: web.Request,
    store: ResponseStore,
    stored: StoredResponse,
    body: ResponsesRequest,
    job: Job,
) -> web.StreamResponse:
    """Answer now; a client that leaves ends it."""
    engine = request.app[SERVER].engine
    if body.stream:
        async with aclosing(outputs_of(job, engine)) as outputs:
            response = await stream_outputs(
                request, request.app[SERVER], outputs, _Writer(stored.answer)
            )
    else:
        response = _json(await collect(job, stored.answer, engine))
    if body.store is not False and stored.answer.is_ended:  # else its client has left
        store.add(stored)
    return response


async def _start(
    request: web.Request,
    store: ResponseStore,
    stored: StoredResponse,
    body: ResponsesRequest,
    job: Job,
    work: ExitStack,
) -> web.StreamResponse:
    """Answer in the background: whoever started it may leave."""
    number = store.num_open(stored.key_id)
    if number >= MAX_BACKGROUND:
        work.close()
        told = f"{number} responses of this key run in the background, the most: wait for one"
        raise RateLimited(told, retry_after_s=RETRY_AFTER_S)
    store.add(stored)
    queued = _json(stored.answer.fields)
    stored.task = asyncio.create_task(_run(request, stored, job, work))
    return await _follow(request, stored, -1) if body.stream else queued


async def _run(request: web.Request, stored: StoredResponse, job: Job, work: ExitStack) -> None:
    answer = stored.answer
    with work:
        try:
            stored.add(answer.begin())
            async with aclosing(outputs_of(job, request.app[SERVER].engine)) as outputs:
                async for _, output in outputs:
                    check_output(output)
                    stored.add(answer.take(output))
        except asyncio.CancelledError:
            stored.add(answer.cancel())
        except Exception as error:  # told in the response; the request has been answered already
            log_refusal(request, error)
            stored.add(answer.fail(error_fields(error)["message"]))


async def retrieve(request: web.Request) -> web.StreamResponse:
    stored = _stored(request)
    if request.query.get("stream") in ("true", "1"):
        if stored.task is None:
            raise RequestError(
                "stream: only a response in the background can be followed", param="stream"
            )
        return await _follow(request, stored, _after(request))
    return _json(stored.answer.fields)


async def listed_input(request: web.Request) -> web.Response:
    """The items that a response was made of, without those of the ones before it."""
    items, (after, limit) = _stored(request).items, page_asked(request)
    if order_asked(request) == "desc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items, 1) if item["id"] == after]
        if not places:
            raise not_after(after)
        items = items[places[0] :]
    return _json(page_of(items, limit))


async def cancel(request: web.Request) -> web.Response:
    stored = _stored(request)
    if stored.task is None:
        raise RequestError("only a response in the background can be cancelled")
    stored.task.cancel()
    await asyncio.wait([stored.task])
    return _json(stored.answer.fields)


async def delete(request: web.Request) -> web.Response:
    stored = _stored(request)
    if stored.task is not None:
        stored.task.cancel()
    name = stored.answer.fields["id"]
    request.app[STORE].delete(stored)
    return _json({"id": name, "object": "response", "deleted": True})


async def _follow(request: web.Request, stored: StoredResponse, after: int) -> web.StreamResponse:
    stream = EventStream(request, request.app[SERVER].limits)
    with stream.kept_alive():
        await stream.start()
        async for events in stored.follow(after):
            await stream.send(_events(events))
        await stream.finish(b"")
    return stream.response


def _after(request: web.Request) -> int:
    given = request.query.get("starting_after", "-1")
    if not given.removeprefix("-").isdecimal() or len(given) > 12:
        raise RequestError("starting_after must be a number", param="starting_after")
    return max(-1, int(given))


def _stored(request: web.Request) -> StoredResponse:
    name = request.match_info["response_id"]
    found = request.app[STORE].get(name, request[KEY_ID])
    if found is None:
        raise HttpError(404, f"there is no response {name[:100]!r}", code="response_not_found")
    return found


class _Writer:
    """A response's events."""

    tail = b""

    def __init__(self, answer: ResponseAnswer):
        self._answer, self._is_begun = answer, False

    def events(self, number: int, output: RequestOutput) -> bytes:
        events = [] if self._is_begun else self._answer.begin()
        self._is_begun = True
        return _events(events + self._answer.take(output))

    def last(self) -> bytes:
        return b""

    def failure(self, error: BaseException) -> bytes:
        return _events(self._answer.fail(error_fields(error)["message"]))


def _events(events: list[Fields]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events
    )


def _json(fields: Fields) -> web.Response:
    return web.Response(body=encode(fields), content_type="application/json")
