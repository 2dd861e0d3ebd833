"""Runs the lines of a batch job over one engine: bounded, in order, each line's fault its own."""

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import CapacityError, EngineStopped, GenerationFailed, OutOfTime, RequestError
from jaxpaged.generate.lines import CHAT, BadLine, Line, read_lines
from jaxpaged.generate.output import OutputFile
from jaxpaged.openai.answers import answer_body

type Record = dict[str, Any]

MAX_TRIES = 5  # of a line that met a full engine, or lost its replica


@dataclass
class Summary:
    """What became of the lines."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0  # done by the run that this one resumes
    num_failed_before: int = 0  # of these, the ones without an answer
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def are_all_answered(self) -> bool:
        return not (self.num_failed or self.num_failed_before)

    def text(self, seconds: float) -> str:
        rate = self.num_output_tokens / seconds if seconds else 0.0
        before = f" ({self.num_failed_before} had failed)" if self.num_failed_before else ""
        return (
            f"answered {self.num_answered}, failed {self.num_failed}, "
            f"skipped {self.num_skipped}{before}; "
            f"{self.num_prompt_tokens} prompt and {self.num_output_tokens} output tokens "
            f"in {seconds:.1f} s, {rate:.1f} tokens/s"
        )


async def run_lines(
    engine: ServedEngine,
    lines: Iterable[bytes],
    output: OutputFile,
    *,
    max_inflight: int,
    keep_order: bool,
    show_progress: bool,
) -> Summary:
    """Answer every line; at most `max_inflight` are read ahead of what has been written.

    With `keep_order` records stand in the order of the lines, else in that of their completion.
    """
    summary = Summary()

    async def wanted() -> AsyncGenerator[Line | BadLine]:
        for line in read_lines(lines):
            if output.done.holds(line):
                summary.num_skipped += 1
                summary.num_failed_before += output.done.has_failed(line)
            else:
                yield line

    def answer(line: Line | BadLine) -> Awaitable[Record]:
        return answer_line(line, lambda line: _try_answer(engine, line))

    records = answered(wanted(), answer, max_inflight=max_inflight, keep_order=keep_order)
    with tqdm(desc="lines", unit="", disable=not show_progress) as bar:
        async with aclosing(records):
            async for ready in records:
                for record in ready:
                    _count(summary, record)
                    output.write(record)
                    bar.update()
    return summary


async def answered(
    lines: AsyncGenerator[Line | BadLine],
    answer: Callable[[Line | BadLine], Awaitable[Record]],
    *,
    max_inflight: int,
    keep_order: bool,
) -> AsyncGenerator[list[Record]]:
    """The records of all lines, as many at a time as are ready. Leaving it ends what still runs."""
    running: deque[asyncio.Future[Record]] = deque()

    async def take_ready() -> list[Record]:
        awaited = [running[0]] if keep_order else running
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        done = itertools.takewhile if keep_order else filter
        ready = list(done(asyncio.Future[Record].done, running))
        for task in ready:
            running.remove(task)
        return [task.result() for task in ready]

    try:
        async with aclosing(lines):
            async for line in lines:
                running.append(asyncio.ensure_future(answer(line)))
                await asyncio.sleep(0)  # let it reach the engine before more is read
                while len(running) >= max_inflight:
                    yield await take_ready()
        while running:
            yield await take_ready()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def answer_line(
    line: Line | BadLine, answer: Callable[[Line], Awaitable[dict[str, Any]]]
) -> Record:
    """The record of one line; `answer` gives the body of one that can be answered."""
    if isinstance(line, BadLine):
        return error_record(line.custom_id, "invalid_line", line.reason, line=line.number)
    try:
        body = await answer(line)
    except RequestError as error:
        return error_record(line.custom_id, "invalid_request", str(error), param=error.param)
    except GenerationFailed as error:
        return error_record(line.custom_id, "generation_failed", str(error))
    except OutOfTime as error:
        return error_record(line.custom_id, "timeout", str(error), param="timeout_s")
    request_id = f"batch-{uuid.uuid4().hex}"
    return {
        "id": request_id,
        "custom_id": line.custom_id,
        "response": {"status_code": 200, "request_id": request_id, "body": body},
        "error": None,
    }


async def _try_answer(engine: ServedEngine, line: Line) -> dict[str, Any]:
    for attempt in range(MAX_TRIES):
        try:
            return await answer_body(engine, line.body, is_chat=line.url == CHAT)
        except CapacityError as error:
            if attempt == MAX_TRIES - 1:
                raise
            await asyncio.sleep(error.retry_after_s)
        except EngineStopped:  # one of several replicas; nothing of the answer was written yet
            if attempt == MAX_TRIES - 1 or not (engine.replicas() and engine.is_running):
                raise
    raise AssertionError("unreachable")


def error_record(
    custom_id: str | None,
    code: str,
    message: str,
    *,
    param: str | None = None,
    line: int | None = None,
) -> Record:
    """What is written for a line without an answer."""
    error: dict[str, Any] = {"code": code, "message": message, "param": param}
    if line is not None:
        error |= {"message": f"line {line}: {message}", "line": line}
    return {
        "id": f"batch-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }


def _count(summary: Summary, record: Record) -> None:
    if record["response"] is None:
        summary.num_failed += 1
        return
    summary.num_answered += 1
    usage = record["response"]["body"]["usage"]
    summary.num_prompt_tokens += usage["prompt_tokens"]
    summary.num_output_tokens += usage["completion_tokens"]
