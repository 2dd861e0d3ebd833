"""Responses kept in memory: for clients to come back to, and for later requests to go on from."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.openai.responses.answer import ResponseAnswer

MAX_STORED = 1000  # responses of one key
MAX_STORED_BYTES = 256 * 2**20  # of all keys, roughly: bodies, outputs, events
EVENT_BYTES, TOKEN_BYTES, PART_BYTES, LEAST_BYTES = 1000, 10, 100, 2000


def parsed_bytes(data: bytes) -> int:
    """About what a body takes once it is parsed: each value is an object."""
    return len(data) + PART_BYTES * sum(data.count(mark) for mark in (b",", b"[", b"{"))


@dataclass(eq=False)
class Turn:
    """What one response adds to its conversation; it stays while a later response goes on from it,
    also where its own one has been dropped.
    """

    messages: list[dict[str, Any]]  # of the request, without instructions, and the answer
    before: "Turn | None"
    num_bytes: int = 0  # as counted last
    num_holders: int = 0  # the stored response that it belongs to, and turns that go on from it

    def conversation(self) -> list[dict[str, Any]]:
        """All messages to the end of this turn."""
        turns: list[Turn] = [self]
        while turns[-1].before is not None:
            turns.append(turns[-1].before)
        return [message for turn in reversed(turns) for message in turn.messages]


@dataclass(eq=False)
class StoredResponse:
    """One response and who may see it. Owned by the event loop."""

    key_id: str
    answer: ResponseAnswer
    turn: Turn
    items: list[dict[str, Any]]  # of its own input, as they are listed
    body_bytes: int
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # in background
    task: asyncio.Task[None] | None = None  # in background
    num_bytes: int = 0  # beside its turn's, as counted last
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self) -> int:
        """Count its bytes and its turn's anew; by how many they have grown."""
        usage = self.answer.fields["usage"] or {"output_tokens": 0}
        grown = self.body_bytes + TOKEN_BYTES * usage["output_tokens"]
        own = grown + EVENT_BYTES * len(self.events) + LEAST_BYTES
        more = own + grown - self.num_bytes - self.turn.num_bytes
        self.num_bytes, self.turn.num_bytes = own, grown
        return more

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
        self._open: set[StoredResponse] = set()  # those that may still grow
        self._num_bytes: Counter[str] = Counter()  # of each key

    @property
    def num_bytes(self) -> int:
        """About what all that is kept takes."""
        return self._num_bytes.total()

    def add(self, stored: StoredResponse) -> None:
        mine = self._kept.setdefault(stored.key_id, OrderedDict())
        mine[stored.answer.fields["id"]] = stored
        self._hold(stored.key_id, stored.turn)
        self._open.add(stored)
        for one in self._open:
            self._num_bytes[one.key_id] += one.count()
        self._open = {one for one in self._open if not one.answer.is_ended}
        while len(mine) > self._max_stored and self._drop_oldest(stored.key_id):
            pass
        sizes = self._num_bytes.copy()
        while sizes.total() > self._max_bytes:
            largest = max(sizes, key=lambda key: sizes[key])
            is_dropped = self._drop_oldest(largest)
            sizes[largest] = self._num_bytes[largest] if is_dropped else 0

    def get(self, response_id: str, key_id: str) -> StoredResponse | None:
        return self._kept.get(key_id, {}).get(response_id)

    def num_open(self, key_id: str) -> int:
        """Responses of a key that have not ended."""
        return sum(one.key_id == key_id and not one.answer.is_ended for one in self._open)

    def delete(self, stored: StoredResponse) -> None:
        """Forget a response, unless that has happened."""
        if self._kept.get(stored.key_id, {}).pop(stored.answer.fields["id"], None) is not None:
            self._open.discard(stored)
            self._num_bytes[stored.key_id] -= stored.num_bytes
            self._release(stored.key_id, stored.turn)

    def _drop_oldest(self, key_id: str) -> bool:
        """Forget a key's oldest response that has ended; False where none has."""
        found = next((one for one in self._kept[key_id].values() if one.answer.is_ended), None)
        if found is not None:
            self.delete(found)
        return found is not None

    def _hold(self, key_id: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders += 1
            if turn.num_holders > 1:
                return
            self._num_bytes[key_id] += turn.num_bytes
            turn = turn.before

    def _release(self, key_id: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self._num_bytes[key_id] -= turn.num_bytes
            turn = turn.before

    def turn(self, response_id: str | None, key_id: str) -> Turn | None:
        """Where a conversation goes on from a response.

        Raises:
            RequestError: there is no such response, or it has not ended.
        """
        if response_id is None:
            return None
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
        return found.turn
