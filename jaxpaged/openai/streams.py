"""Outputs of one or several prompts of a request, in one stream."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from jaxpaged.engine.outputs import RequestOutput

type Outputs = AsyncGenerator[RequestOutput]
type Numbered = AsyncGenerator[tuple[int, RequestOutput]]


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all at the same time, each begun in a pass of the event loop of its own.

    The first error ends all, and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
                await asyncio.sleep(0)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def merged(sources: Sequence[Outputs]) -> Numbered:
    """(prompt's number, output) as they come. Leaving it closes every source."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def forward(number: int, source: Outputs) -> None:
        async with aclosing(source) as outputs:
            async for output in outputs:
                queue.put_nowait((number, output))

    async def forward_all() -> None:
        try:
            await run_all(forward(number, source) for number, source in enumerate(sources))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(forward_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # told already, or of no use to a client that has left
