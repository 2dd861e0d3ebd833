"""--warmup-file: requests that are answered before the server takes others."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import ConfigError, JaxPagedError
from jaxpaged.openai.answers import answer_body

log = logging.getLogger(__name__)

AT_ONCE = 64  # requests in flight


async def warm_up(engine: ServedEngine, file: Path) -> None:
    """Answer every line of `file`: a body of completions, or of chat where it has messages.

    Raises:
        ConfigError: a line that is no such body, or cannot be served; its number is named.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(number: int, body: dict[str, Any]) -> None:
        async with room:
            try:
                await answer_body(engine, body, is_chat="messages" in body)
            except JaxPagedError as error:
                raise ConfigError(f"--warmup-file line {number}: {error}") from None

    bodies = _read(file)
    try:
        async with asyncio.TaskGroup() as group:
            for number, body in bodies:
                group.create_task(answer(number, body))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    log.info("warmed up with %d requests of %s", len(bodies), file.name)


def _read(file: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--warmup-file cannot be read: {error.strerror}") from None
    bodies: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            bodies.append((number, msgspec.json.decode(line, type=dict[str, Any])))
        except msgspec.DecodeError:
            raise ConfigError(f"--warmup-file line {number} is no JSON object") from None
    return bodies
