"""Requests that arrive at once are read one by one; tokens on their way out pass between."""

import asyncio
from collections import deque


class Turns:
    """Lets one caller go on for each pass of the event loop. Owned by the loop.

    A burst of requests becomes readable in one pass; read all in that pass, they would hold up the
    chunks of every open stream until the last of them is at the engine.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def next(self) -> None:
        """Wait for a pass that nobody else takes; at once where there is one."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()  # its caller has left
        self._is_taken = bool(self._waiting)
        if self._is_taken:
            self._waiting.popleft().set_result(None)
            asyncio.get_running_loop().call_soon(self._pass_on)
