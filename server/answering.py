"""From an admitted request to its answer: one JSON object, or a stream of chunks."""

import logging
from contextlib import aclosing

from aiohttp import web

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.openai.answers import check_output, outputs_of, whole_answer
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.job import Job
from jaxpaged.openai.streams import Numbered
from server.direct import stream_directly
from server.errors import error_body, log_refusal
from server.sse import EventStream
from server.state import ServerState

log = logging.getLogger(__name__)


async def respond(request: web.Request, server: ServerState, job: Job) -> web.StreamResponse:
    """Run the job and answer; leaving for any reason aborts it."""
    server.open_ids.update(job.request_ids)
    try:
        if job.body.stream and job.form.is_plain and not job.each_usage:
            return await stream_directly(request, server, job)
        if not job.body.stream:
            fields = await whole_answer(job, server.engine)
            return web.Response(body=encode(fields), content_type="application/json")
        async with aclosing(outputs_of(job, server.engine)) as outputs:
            return await _stream(request, server, job, outputs)
    finally:
        server.open_ids.difference_update(job.request_ids)


async def _stream(
    request: web.Request, server: ServerState, job: Job, outputs: Numbered
) -> web.StreamResponse:
    first = await anext(outputs)  # a refusal comes here, while there is a status to tell it with
    check_output(first[1])
    stream = EventStream(request, server.limits.write_timeout_s)
    await stream.start()
    chunks = _Chunks(job)
    try:
        await stream.send(chunks.events(*first))
        async for number, output in outputs:
            check_output(output)
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
        self._job, self._form = job, job.form
        self.usage, self.writer = job.usage, job.chunk_writer()
        self._open_prompts: set[int] = set()
        self._opened: set[int] = set()

    def events(self, number: int, output: RequestOutput) -> bytes:
        """Everything that `output` adds, as events."""
        if number not in self._open_prompts:
            self._open_prompts.add(number)
            self.usage.add_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
        return b"".join([self._event(number, output, part) for part in output.outputs])

    def _event(self, number: int, output: RequestOutput, part: CompletionOutput) -> bytes:
        self.usage.completion_tokens += len(part.token_ids)
        index = self._job.index(number, part.index)
        chunk = self._form.chunk(index, output, part)
        event = b"" if chunk is None else self.writer.choices([chunk], self.usage)
        opening = None if index in self._opened else self._form.opening(index)
        self._opened.add(index)
        return event if opening is None else self.writer.choices([opening], self.usage) + event
