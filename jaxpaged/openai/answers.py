"""A job's answers: its outputs as they come, or all of them as one object."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from jaxpaged.engine.inputs import Prompt
from jaxpaged.engine.outputs import RequestOutput
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import GenerationFailed, JaxPagedError, OutOfTime, RequestError
from jaxpaged.openai.chat import chat_job, naming_fields, read_chat
from jaxpaged.openai.chunks import Usage, encode
from jaxpaged.openai.completions import completion_job, read_completion
from jaxpaged.openai.job import Job
from jaxpaged.openai.schema import ChatRequest
from jaxpaged.openai.streams import Numbered, Outputs, merged

MANY_PLACES = 256  # with logprobs, whose writing takes some 5 ms


def outputs_of(job: Job, engine: ServedEngine) -> Numbered:
    """(prompt's number, output) as they come; closing it aborts what still runs."""

    def outputs(request_id: str, prompt: Prompt) -> Outputs:
        salt, name = job.cache_salt, job.key_name
        for_all = {"priority": job.priority, "cache_salt": salt, "key_name": name}
        if job.beams is not None:
            return engine.beam_search(prompt, job.beams, request_id, **for_all)
        return engine.generate(prompt, job.params, request_id, **for_all)

    return merged([outputs(*one) for one in zip(job.request_ids, job.prompts, strict=True)])


async def whole_answer(job: Job, engine: ServedEngine) -> dict[str, Any]:
    """The JSON object that answers a job without a stream.

    Raises:
        GenerationFailed: the model failed on one of its prompts.
        RequestError: a grammar of the request did.
    """
    usage, choices, of_prompt = job.usage, dict[int, msgspec.Raw](), dict[str, msgspec.Raw]()
    async with aclosing(outputs_of(job, engine)) as outputs:
        async for number, output in outputs:
            check_output(output)
            usage.add_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
            usage.completion_tokens += sum(len(part.token_ids) for part in output.outputs)
            job.note_times(output.times)
            written = await off_the_loop(output, partial(_written, job, number, output))
            choices |= written[0]
            of_prompt |= written[1]
    fields = job.envelope.fields(job.form.kind)
    fields["choices"] = [choices[index] for index in sorted(choices)]
    fields |= {"usage": usage.fields()} | usage.metrics() | of_prompt
    if job.params.explain:
        fields["explain"] = [await engine.explanation(name) for name in job.request_ids]
    return fields


def _written(
    job: Job, number: int, output: RequestOutput
) -> tuple[dict[int, msgspec.Raw], dict[str, msgspec.Raw]]:
    """What an output says of its answers, each written by itself, and of its prompt."""
    written: dict[int, msgspec.Raw] = {}
    for part in output.outputs:
        index = job.index(number, part.index)
        written[index] = msgspec.Raw(encode(job.form.choice(index, output, part)))
    of_prompt = job.form.of_prompt(output)
    return written, {name: msgspec.Raw(encode(value)) for name, value in of_prompt.items()}


async def off_the_loop[T](output: RequestOutput, write: Callable[[], T]) -> T:
    """Write what an output says: in a worker thread where that takes long, as many logprobs do."""
    scored = [part for part in output.outputs if part.logprobs is not None]
    num_places = sum(len(part.token_ids) for part in scored)
    if output.prompt_logprobs is not None:
        num_places += len(output.prompt_logprobs) * len(output.outputs)
    return await asyncio.to_thread(write) if num_places > MANY_PLACES else write()


async def answer_body(
    engine: ServedEngine,
    body: dict[str, Any],
    *,
    is_chat: bool,
    model: str = "",
    key_id: str = "",
    priority: int | None = None,
) -> dict[str, Any]:
    """Answer a body that came as an object, not over HTTP, under a model's name.

    Its own priority counts only where none is given.

    Raises:
        RequestError: what can never be served; a stream cannot be asked for here.
    """
    if body.get("stream"):
        raise RequestError("stream is not served in a batch: leave it out", param="stream")
    data, usage = msgspec.json.encode(body), Usage()
    asker = {"model": model or engine.served_model_names[0], "key_id": key_id}
    read = read_chat(data) if is_chat else read_completion(data)
    read.priority = read.priority if priority is None else priority
    if not isinstance(read, ChatRequest):
        job = await completion_job(read, engine, usage, **asker)
        return await _in_its_time(job, engine)
    with naming_fields(read, str):
        job = await chat_job(read, engine, usage, **asker)
        return await _in_its_time(job, engine)


async def _in_its_time(job: Job, engine: ServedEngine) -> dict[str, Any]:
    async with in_time(job.body.timeout_s):
        return await whole_answer(job, engine)


@asynccontextmanager
async def in_time(seconds: float | None) -> AsyncGenerator[None]:
    """End what is inside once its time has passed; None gives it all the time.

    Raises:
        OutOfTime: it has.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise OutOfTime(f"timeout_s of {seconds:g} s has passed") from None


def check_output(output: RequestOutput) -> None:
    """Refuse an output that ended by an error."""
    for part in output.outputs:
        if part.finish_reason == "error":
            raise failure_of(output.error, part.stop_reason)


def failure_of(error: str | None, at_fault: int | str | None) -> JaxPagedError:
    """What an answer's end by `error` is to the client: its own fault where a parameter is named,
    as of a grammar that comes to a place from which no token leads on.
    """
    text = error or "the model failed on this request"
    return (
        RequestError(text, param=at_fault) if isinstance(at_fault, str) else GenerationFailed(text)
    )
