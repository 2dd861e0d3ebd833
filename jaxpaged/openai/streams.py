"""Outputs of one or several prompts of a request, in one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxpaged.engine.outputs import RequestOutput

type Outputs = AsyncGenerator[RequestOutput]
type Numbered = AsyncGenerator[tuple[int, RequestOutput]]


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
            async with asyncio.TaskGroup() as group:
                for number, source in enumerate(sources):
                    group.create_task(forward(number, source))
                    await asyncio.sleep(0)  # each is encoded in its own pass of the loop
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(forward_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        try:
            await task
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # told already, or of no use to a client that has left
