"""Answers that wait for the first answer to the same prompt."""

from collections.abc import Iterator

from jaxpaged.core.policies import Policy
from jaxpaged.core.sequence import Sequence


class Forks:
    """Further answers of requests with `n > 1`, by their first one. Owned by the scheduler.

    The first answer's sequence computes the prompt. Once that is planned, the others are ready:
    from the next step on they share its pages, and each copies the page that the prompt ends in.
    Should it end earlier, they compute for themselves.
    """

    def __init__(self):
        self.ready: list[Sequence] = []  # to be queued before the next step is planned
        self._first: dict[str, int] = {}  # request id: seq_id of the first answer
        self._others: dict[int, list[Sequence]] = {}  # seq_id of the first answer: the others

    def __bool__(self) -> bool:
        """Whether anybody waits for a first answer."""
        return bool(self._others)

    def __len__(self) -> int:
        return len(self.ready) + sum(len(others) for others in self._others.values())

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.ready
        for others in self._others.values():
            yield from others

    def takes(self, seq: Sequence) -> bool:
        """Keep a new sequence here if it has a first answer to wait for."""
        request = seq.request
        if request.params.n == 1 or seq.num_prompt_tokens == 1:
            return False
        if not seq.choice:
            self._first[request.request_id] = seq.seq_id
            self._others[seq.seq_id] = []
            return False
        first = self._first.get(request.request_id)
        if first is None:
            return False
        self._others[first].append(seq)
        return True

    def queue_ready(self, line: Policy) -> None:
        """Put those that wait no longer into the line, before others of their rank."""
        for seq in reversed(self.ready):
            line.put_back(seq)
        self.ready.clear()

    def release(self, first: Sequence) -> None:
        """The first answer's prompt is planned, or it has ended."""
        others = self._others.pop(first.seq_id, None)
        if others is not None:
            for seq in others:
                seq.arrival_mark = first.arrival_mark
            self.ready += others
            self._first.pop(first.request.request_id, None)

    def drop(self, seq: Sequence) -> bool:
        """Forget a sequence that waits here; False if it does not."""
        for waiting in (self.ready, *self._others.values()):
            if seq in waiting:
                waiting.remove(seq)
                return True
        return False
