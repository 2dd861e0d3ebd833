"""Responses kept in memory: for clients to come back to, and for later requests to go on from."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.openai.responses.answer import ResponseAnswer

MAX_STORED = 1000  # responses
MAX_STORED_BYTES = 256 * 2**20  # of bodies and outputs, roughly


@dataclass(eq=False)
class StoredResponse:
    """One response and who may see it. Owned by the event loop."""

    key_id: str
    answer: ResponseAnswer
    messages: list[dict[str, Any]]  # of the conversation before its answer, without instructions
    body_bytes: int
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # in background
    task: asyncio.Task[None] | None = None  # in background
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        return self.body_bytes + 200 * len(self.events) + 1000

    def add(self, events: list[dict[str, Any]]) -> None:
        self.events += events
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[list[dict[str, Any]]]:
        """Events with numbers over `after`, as they come, to the last."""
        place = after + 1
        while True:
            changed = self._changed
            new = self.events[place:]
            if new:
                place += len(new)
                yield new
            elif self.answer.is_ended:
                return
            else:
                await changed.wait()


class ResponseStore:
    """The latest responses of all keys, by id. A key sees its own only."""

    def __init__(self, max_stored: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES):
        self._max_stored, self._max_bytes = max_stored, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, stored: StoredResponse) -> None:
        self._kept[stored.answer.fields["id"]] = stored
        ended = [name for name, one in self._kept.items() if one.answer.is_ended]
        total = sum(one.num_bytes for one in self._kept.values())
        while ended and (len(self._kept) > self._max_stored or total > self._max_bytes):
            total -= self._kept.pop(ended.pop(0)).num_bytes

    def get(self, response_id: str, key_id: str) -> StoredResponse | None:
        found = self._kept.get(response_id)
        return found if found is not None and found.key_id == key_id else None

    def delete(self, response_id: str) -> None:
        self._kept.pop(response_id, None)

    def history(self, response_id: str | None, key_id: str) -> list[dict[str, Any]]:
        """The conversation up to and with a response.

        Raises:
            RequestError: there is no such response, or it has not ended.
        """
        if response_id is None:
            return []
        found = self.get(response_id, key_id)
        if found is None:
            raise RequestError(
                f"previous_response_id {response_id[:100]!r} is not stored here: responses are "
                "kept in memory, the oldest are dropped",
                param="previous_response_id",
            )
        if not found.answer.is_ended:
            raise RequestError(
                f"response {response_id} has not ended: wait for it", param="previous_response_id"
            )
        return [*found.messages, found.answer.message]
