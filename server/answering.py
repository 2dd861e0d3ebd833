"""From an admitted request to its answer: one JSON object, or a stream of chunks."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from server.chunks import ChunkWriter, Envelope, Usage, encode
from server.errors import HttpError, error_body, log_refusal
from server.schema import SamplingFields
from server.sse import EventStream
from server.state import ServerState
from server.streams import Numbered, merged

log = logging.getLogger(__name__)


class Form(Protocol):
    """How one endpoint writes its answers."""

    kind: str
    chunk_kind: str
    is_plain: bool  # a chunk in the middle of an answer needs no more than its text

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice to stream before an answer's first text."""
        ...

    def choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        """An answer, whole."""
        ...

    def chunk(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        """What a step added to an answer."""
        ...


@dataclass(frozen=True)
class Job:
    """A request that has passed all checks that need no engine."""

    body: SamplingFields
    prompts: Sequence[Any]
    params: SamplingParams
    envelope: Envelope
    form: Form
    cache_salt: str

    def index(self, number: int, part: CompletionOutput) -> int:
        """An answer's place among those of all prompts."""
        return number * self.params.n + part.index


async def respond(request: web.Request, server: ServerState, job: Job) -> web.StreamResponse:
    """Run the job and answer; leaving for any reason aborts it."""
    ids = [f"{job.envelope.answer_id}-{number}" for number in range(len(job.prompts))]
    sources = [
        server.engine.generate(
            prompt,
            job.params,
            request_id,
            priority=job.body.priority or 0,
            cache_salt=job.cache_salt,
        )
        for request_id, prompt in zip(ids, job.prompts, strict=True)
    ]
    server.open_ids.update(ids)
    try:
        async with aclosing(merged(sources)) as outputs:
            if job.body.stream:
                return await _stream(request, server, job, outputs)
            return await _whole(job, outputs)
    finally:
        server.open_ids.difference_update(ids)


async def _whole(job: Job, outputs: Numbered) -> web.Response:
    usage, choices = Usage(), dict[int, dict[str, Any]]()
    async for number, output in outputs:
        _check(output)
        usage.add_prompt(output)
        for part in output.outputs:
            usage.completion_tokens += len(part.token_ids)
            index = job.index(number, part)
            choices[index] = job.form.choice(index, output, part)
    fields = job.envelope.fields(job.form.kind)
    fields["choices"] = [choices[index] for index in sorted(choices)]
    fields["usage"] = usage.fields()
    return web.Response(body=encode(fields), content_type="application/json")


async def _stream(
    request: web.Request, server: ServerState, job: Job, outputs: Numbered
) -> web.StreamResponse:
    first = await anext(outputs)  # a refusal comes here, while there is a status to tell it with
    _check(first[1])
    stream = EventStream(request, server.limits.write_timeout_s)
    await stream.start()
    chunks = _Chunks(job)
    try:
        await stream.send(chunks.events(*first))
        async for number, output in outputs:
            _check(output)
            await stream.send(chunks.events(number, output))
        await stream.send(chunks.writer.last(chunks.usage))
    except ConnectionError as error:
        log.info("%s: %s", job.envelope.answer_id, error)
        return stream.response
    except Exception as error:
        log_refusal(request, error)
        await stream.send(b"data: " + error_body(error) + b"\n\n")
    return await stream.finish()


class _Chunks:
    """Outputs to events, for one stream."""

    def __init__(self, job: Job):
        options = job.body.stream_options
        with_usage = bool(options and options.include_usage)
        each_usage = bool(with_usage and options and options.continuous_usage_stats)
        self._job, self._form = job, job.form
        self.usage = Usage()
        self.writer = ChunkWriter(
            job.envelope, job.form.chunk_kind, with_usage=with_usage, each_usage=each_usage
        )
        self._is_plain = self._form.is_plain and self.writer.is_plain
        self._open_prompts: set[int] = set()
        self._opened: set[int] = set()

    def events(self, number: int, output: RequestOutput) -> bytes:
        """Everything that `output` adds, as events."""
        if number not in self._open_prompts:
            self._open_prompts.add(number)
            self.usage.add_prompt(output)
        return b"".join([self._event(number, output, part) for part in output.outputs])

    def _event(self, number: int, output: RequestOutput, part: CompletionOutput) -> bytes:
        self.usage.completion_tokens += len(part.token_ids)
        index = self._job.index(number, part)
        if index in self._opened:
            if self._is_plain and part.finish_reason is None:
                return self.writer.text(index, part.text)
            return self.writer.choices([self._form.chunk(index, output, part)], self.usage)
        self._opened.add(index)
        opening = self._form.opening(index)
        event = self.writer.choices([self._form.chunk(index, output, part)], self.usage)
        return event if opening is None else self.writer.choices([opening], self.usage) + event


def _check(output: RequestOutput) -> None:
    for part in output.outputs:
        if part.finish_reason == "error":
            raise HttpError(500, output.error or "the model failed on this request")
