"""Plain streams: an event of the engine is bytes on the connection within one call.

No task wakes for a token. The engine tells all events of a step in one callback of the event loop,
and each is encoded and written there; the handler sleeps until its answers have ended, the client
stops reading, or something fails.
"""

import asyncio
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from aiohttp import web

from jaxpaged.core.request import TokenEvent
from jaxpaged.engine.inbox import spaced
from jaxpaged.openai.answers import failure_of
from jaxpaged.openai.job import Job
from jaxpaged.openai.streams import run_all
from server.errors import error_body, log_refusal
from server.sse import EventStream
from server.state import ServerState


class DirectStream:
    """The answers of one HTTP request. Events that come before `resume` are kept."""

    def __init__(self, job: Job, events: EventStream):
        self._job, self._events = job, events
        self._writer = job.chunk_writer()
        self._opened: set[int] = set()
        self._kept: list[bytes] = []
        self._is_writing = False
        self._num_open = len(job.prompts) * job.params.n
        self.usage = job.usage
        self.error: Exception | None = None
        self.woken = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._num_open == 0

    @property
    def must_wait(self) -> bool:
        """The client reads too slowly."""
        return not self._is_writing

    def take(self, number: int, event: TokenEvent) -> None:
        """Write what one step added to an answer of prompt `number`."""
        index = self._job.index(number, event.choice)
        self.usage.completion_tokens += len(event.token_ids)
        if event.finish_reason is None and index in self._opened:
            data = self._writer.text(index, event.text)
        else:
            data = self._first_or_last(index, event)
        if not self._is_writing:
            self._kept.append(data)
            self.woken.set()
        elif not self._events.write(data):
            self._is_writing = False
            self.woken.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.woken.set()

    def resume(self) -> None:
        """Write what was kept, and from now on at once."""
        kept, self._kept = b"".join(self._kept), []
        self._is_writing = self._events.write(kept)

    def last(self) -> bytes:
        return self._writer.last(self.usage)

    def _first_or_last(self, index: int, event: TokenEvent) -> bytes:
        data = b""
        if index not in self._opened:
            self._opened.add(index)
            opening = self._job.form.opening(index)
            if opening is not None:
                data = self._writer.choices([opening], self.usage)
        if event.finish_reason is None:
            return data + self._writer.text(index, event.text)
        self._num_open -= 1
        self._job.note_times(event.times)
        if not self._num_open:
            self.woken.set()
        if event.finish_reason == "error":
            self.fail(failure_of(event.error, event.stop_reason))
            return data
        return data + self._writer.end(index, event.text, event.finish_reason, event.stop_reason)


@dataclass(eq=False)
class _PromptSink:
    """The events of one prompt."""

    stream: DirectStream
    number: int
    num_open: int
    num_cached_tokens: int = 0

    def put(self, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            self.num_open -= 1
        self.num_cached_tokens = event.num_cached_tokens
        self.stream.take(self.number, event)

    def fail(self, error: Exception) -> None:
        self.stream.fail(error)


async def stream_directly(
    request: web.Request, server: ServerState, job: Job
) -> web.StreamResponse:
    """Answer a job whose chunks need no more than text."""
    events = EventStream(request, server.limits)
    stream = DirectStream(job, events)
    sinks = [_PromptSink(stream, i, job.params.n) for i in range(len(job.prompts))]
    engine, submitted = server.engine, list[tuple[str, _PromptSink]]()

    async def submit(request_id: str, prompt: Any, sink: _PromptSink) -> None:
        made, _ = await engine.submit(
            prompt,
            job.params,
            request_id,
            spaced(sink, job.params),
            priority=job.priority,
            cache_salt=job.cache_salt,
            key_name=job.key_name,
        )
        submitted.append((request_id, sink))
        stream.usage.add_prompt(len(made.prompt_token_ids), 0)

    every = list(zip(job.request_ids, job.prompts, sinks, strict=True))
    try:
        await (submit(*every[0]) if len(every) == 1 else run_all(starmap(submit, every)))
        with events.kept_alive():
            await stream.woken.wait()
            if stream.error is not None and not events.is_started:
                raise stream.error  # while there is a status to tell it with
            await events.start()
            await _run(request, stream, events, sinks)
        return events.response
    finally:
        for request_id, sink in submitted:
            engine.release(request_id, is_finished=sink.num_open == 0)


async def _run(
    request: web.Request, stream: DirectStream, events: EventStream, sinks: list[_PromptSink]
) -> None:
    while True:
        stream.woken.clear()
        stream.resume()
        if stream.must_wait:
            await events.wait_for_reader()
            continue
        if stream.is_done or stream.error is not None:
            break
        await stream.woken.wait()
    if stream.error is not None:
        log_refusal(request, stream.error)
        await events.send(b"data: " + error_body(stream.error) + b"\n\n")
    else:
        stream.usage.cached_tokens = sum(sink.num_cached_tokens for sink in sinks)
        await events.send(stream.last())
    await events.finish()
