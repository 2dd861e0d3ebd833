"""From an admitted request to its answer: one JSON object, or a stream of chunks."""

from contextlib import aclosing
from functools import partial
from typing import Protocol

from aiohttp import web

from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.openai.answers import check_output, off_the_loop, outputs_of, whole_answer
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.job import Job
from jaxpaged.openai.streams import Numbered
from server.direct import stream_directly
from server.errors import error_body, log_refusal
from server.sse import DONE, EventStream
from server.state import ServerState


class Writer(Protocol):
    """How outputs are written as events."""

    tail: bytes  # ends every stream

    def events(self, number: int, output: RequestOutput) -> bytes:
        """Everything that an output of prompt `number` adds."""
        ...

    def last(self) -> bytes:
        """What follows the last output."""
        ...

    def failure(self, error: BaseException) -> bytes: ...


async def respond(
    request: web.Request, server: ServerState, job: Job, kind: str
) -> web.StreamResponse:
    """Run the job of an endpoint of this kind and answer; leaving for any reason aborts it."""
    with server.open(job, kind, streams=bool(job.body.stream)):
        is_plain = job.form.is_plain and not job.each_usage and job.beams is None
        if job.body.stream and is_plain:
            return await stream_directly(request, server, job)
        if not job.body.stream:
            fields = await whole_answer(job, server.engine)
            return web.Response(body=encode(fields), content_type="application/json")
        async with aclosing(outputs_of(job, server.engine)) as outputs:
            return await stream_outputs(request, server, outputs, _Chunks(job))


async def stream_outputs(
    request: web.Request, server: ServerState, outputs: Numbered, writer: Writer
) -> web.StreamResponse:
    """Answer with a stream of events, as outputs come."""
    stream = EventStream(request, server.limits)
    with stream.kept_alive():
        try:
            async for number, output in outputs:
                check_output(output)
                await stream.start()
                events = await off_the_loop(output, partial(writer.events, number, output))
                await stream.send(events)
            await stream.send(writer.last())
        except ConnectionError:
            raise
        except Exception as error:
            if not stream.is_started:
                raise  # while there is a status to tell it with
            log_refusal(request, error)
            await stream.start()
            await stream.send(writer.failure(error))
        await stream.finish(writer.tail)
    return stream.response


class _Chunks:
    """Outputs to OpenAI's chunks, for one stream."""

    tail = DONE

    def __init__(self, job: Job):
        self._job, self._form = job, job.form
        self._usage, self._writer = job.usage, job.chunk_writer()
        self._open_prompts: set[int] = set()
        self._opened: set[int] = set()

    def events(self, number: int, output: RequestOutput) -> bytes:
        if number not in self._open_prompts:
            self._open_prompts.add(number)
            self._usage.add_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
        return b"".join([self._event(number, output, part) for part in output.outputs])

    def last(self) -> bytes:
        return self._writer.last(self._usage)

    def failure(self, error: BaseException) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _event(self, number: int, output: RequestOutput, part: CompletionOutput) -> bytes:
        self._usage.completion_tokens += len(part.token_ids)
        if part.finish_reason is not None:
            self._job.note_times(output.times)
        index = self._job.index(number, part.index)
        chunk = self._form.chunk(index, output, part)
        is_first = not self._opened  # of all: what is told of the prompt goes with it
        opening = None if index in self._opened else self._form.opening(index)
        self._opened.add(index)
        chunks = [one for one in (opening, chunk) if one is not None]
        beside = self._form.of_prompt(output) if is_first else None
        return b"".join(
            self._writer.choices([one], self._usage, None if place else beside)
            for place, one in enumerate(chunks)
        )
