"""Responses kept in memory: for clients to come back to, and for later requests to go on from."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.openai.responses.answer import ResponseAnswer

MAX_STORED = 1000  # responses of one key
MAX_STORED_BYTES = 256 * 2**20  # of all keys, roughly: bodies, outputs, events
EVENT_BYTES, TOKEN_BYTES, LEAST_BYTES = 1000, 10, 2000


@dataclass(eq=False)
class StoredResponse:
    """One response and who may see it. Owned by the event loop."""

    key_id: str
    answer: ResponseAnswer
    messages: list[dict[str, Any]]  # of the conversation before its answer, without instructions
    items: list[dict[str, Any]]  # of its own input, as they are listed
    body_bytes: int
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # in background
    task: asyncio.Task[None] | None = None  # in background
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        usage = self.answer.fields["usage"] or {"output_tokens": 0}
        grown = EVENT_BYTES * len(self.events) + TOKEN_BYTES * usage["output_tokens"]
        return 2 * self.body_bytes + grown + LEAST_BYTES

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
    """The latest responses of each key, by id. A key sees its own only, and pushes out its own.

    Where all together are too large, the key that keeps most loses its oldest.
    """

    def __init__(self, max_stored: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES):
        self._max_stored, self._max_bytes = max_stored, max_bytes
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}

    def add(self, stored: StoredResponse) -> None:
        mine = self._kept.setdefault(stored.key_id, OrderedDict())
        mine[stored.answer.fields["id"]] = stored
        while len(mine) > self._max_stored and self._drop_oldest(stored.key_id):
            pass
        sizes = {key: _size(kept) for key, kept in self._kept.items()}
        while sum(sizes.values()) > self._max_bytes:
            largest = max(sizes, key=lambda key: sizes[key])
            sizes[largest] -= self._drop_oldest(largest) or sizes[largest]

    def get(self, response_id: str, key_id: str) -> StoredResponse | None:
        return self._kept.get(key_id, {}).get(response_id)

    def num_open(self, key_id: str) -> int:
        """Responses of a key that have not ended."""
        return sum(not one.answer.is_ended for one in self._kept.get(key_id, {}).values())

    def delete(self, stored: StoredResponse) -> None:
        self._kept.get(stored.key_id, {}).pop(stored.answer.fields["id"], None)

    def _drop_oldest(self, key_id: str) -> int:
        """Forget a key's oldest response that has ended; its bytes, 0 where none has."""
        kept = self._kept[key_id]
        name = next((name for name, one in kept.items() if one.answer.is_ended), None)
        return 0 if name is None else kept.pop(name).num_bytes

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


def _size(kept: OrderedDict[str, StoredResponse]) -> int:
    return sum(stored.num_bytes for stored in kept.values())
