"""/v1/responses: a body to a job and the response that it becomes."""

from contextlib import aclosing
from typing import Any

import msgspec

from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import RequestError
from jaxpaged.openai.answers import check_output, in_time, outputs_of
from jaxpaged.openai.chat import ChatForm, chat_job
from jaxpaged.openai.chunks import Usage
from jaxpaged.openai.job import Job
from jaxpaged.openai.responses.answer import ResponseAnswer
from jaxpaged.openai.responses.convert import chat_request, naming_its_fields
from jaxpaged.openai.responses.schema import ResponsesRequest, read_responses
from jaxpaged.openai.schema import ChatRequest

_NOT_IN_A_BATCH = ("stream", "background", "previous_response_id")


async def response_job(
    body: ResponsesRequest,
    chat: ChatRequest,
    engine: ServedEngine,
    usage: Usage,
    *,
    model: str,
    key_id: str,
) -> tuple[Job, ResponseAnswer]:
    """What the engine is asked, and the response as it is before any output.

    Raises:
        RequestError: what can never be served.
    """
    job = await chat_job(chat, engine, usage, model=model, key_id=key_id)
    assert isinstance(job.form, ChatForm)
    number = job.envelope.answer_id.removeprefix("chatcmpl-")
    return job, ResponseAnswer(body, model, number, job.form.parsed(), usage)


async def collect(job: Job, answer: ResponseAnswer, engine: ServedEngine) -> dict[str, Any]:
    """Run the job to its end; the response then."""
    answer.begin()
    async with aclosing(outputs_of(job, engine)) as outputs:
        async for _, output in outputs:
            check_output(output)
            answer.take(output)
    return answer.fields


async def answer_response(
    engine: ServedEngine, given: dict[str, Any], *, model: str, key_id: str, priority: int
) -> dict[str, Any]:
    """The response to a body that came as an object, not over HTTP; it is not stored."""
    body = read_responses(msgspec.json.encode(given | {"store": False}))
    for name in _NOT_IN_A_BATCH:
        if getattr(body, name):
            raise RequestError(f"{name} is not served in a batch: leave it out", param=name)
    chat = chat_request(body, ())
    chat.priority = priority
    with naming_its_fields(chat):
        job, answer = await response_job(body, chat, engine, Usage(), model=model, key_id=key_id)
        async with in_time(chat.timeout_s):
            return await collect(job, answer, engine)
