"""How the texts of a step that embeds lie on the device.

A step takes whole texts, end to end. For an encoder they fill rows of one length, so that a token
is compared with its row and not with the whole step; for a decoder they are a ragged batch over
pages of their own, and a text over the step's tokens comes in chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxpaged.core.text_queue import Text, TextQueue

ALIGNMENT = 64  # words: a field may go to a GPU kernel as it lies, on a border of 256 bytes
TOKENS_A_TEXT = 8  # a step is made for texts of at least so many on average
FEWEST_TOKENS = 32
ROW_COST = 2048  # a row of so many tokens takes twice the time of short rows with as many tokens

type Shapes = Mapping[str, tuple[int, ...]]


class PoolingBucket(Protocol):
    """One compiled program: its name, and the shapes of what it is told."""

    @property
    def name(self) -> str: ...

    @property
    def shapes(self) -> Shapes: ...


@dataclass(frozen=True)
class HostStep:
    """A step as one buffer; result `i` is that of `texts[i]`. A chunk but the last has no texts."""

    bucket: Any
    packed: NDArray[np.int32]
    texts: tuple[Text, ...]
    num_tokens: int


class TextPacker(Protocol):
    """Makes steps of texts."""

    @property
    def buckets(self) -> Sequence[Any]: ...

    def steps(self, queue: TextQueue) -> list[HostStep]:
        """Take texts from the queue: one step, or the chunks of one long text."""
        ...


@dataclass(frozen=True)
class RowBucket:
    """Texts in `rows` rows of `row_len` tokens."""

    rows: int
    row_len: int
    num_texts: int

    @property
    def name(self) -> str:
        return f"rows {self.rows} {self.row_len} {self.num_texts}"

    @property
    def shapes(self) -> Shapes:
        place = (self.rows, self.row_len)
        tokens = dict.fromkeys(("token_ids", "positions", "token_types", "texts"), place)
        return tokens | {"first": (self.num_texts,)}


class RowPacker:
    """Steps of an encoder: of the buckets, the one that the waiting texts fill best."""

    def __init__(self, max_len: int, max_tokens: int):
        row_lens = [*_powers(FEWEST_TOKENS, max_len), max_len]
        self.buckets = [
            RowBucket(max(1, tokens // row_len), row_len, max(1, tokens // TOKENS_A_TEXT))
            for tokens in _ladder(max(max_tokens, max_len))
            for row_len in row_lens
            if row_len <= tokens
        ]
        self._window = 2 * self.buckets[-1].num_texts

    def steps(self, queue: TextQueue) -> list[HostStep]:
        window = queue.take(self._window)
        if not window:
            return []
        first, rest = window[0], sorted(window[1:], key=lambda text: -len(text.token_ids))
        best, best_rows, best_worth = None, [], 0.0
        for bucket in self.buckets:
            if bucket.row_len >= len(first.token_ids):
                rows = _fill(bucket, [first, *rest])
                num_tokens = sum(len(text.token_ids) for row in rows for text in row)
                cost = bucket.rows * bucket.row_len * (1 + bucket.row_len / ROW_COST)
                if num_tokens / cost > best_worth:
                    best, best_rows, best_worth = bucket, rows, num_tokens / cost
        assert best is not None, "a text is longer than the model's longest"
        step = _rows_step(best, best_rows)
        taken = set(map(id, step.texts))
        queue.put_back(text for text in window if id(text) not in taken)
        return [step]


def _fill(bucket: RowBucket, texts: Sequence[Text]) -> list[list[Text]]:
    """Each text into the first row that has room for it."""
    rows: list[list[Text]] = [[] for _ in range(bucket.rows)]
    free, left = [bucket.row_len] * bucket.rows, bucket.num_texts
    for text in texts:
        num = len(text.token_ids)
        place = next((row for row, room in enumerate(free) if room >= num), None)
        if place is not None:
            rows[place].append(text)
            free[place] -= num
            left -= 1
            if not left:
                break
    return rows


def _rows_step(bucket: RowBucket, rows: Sequence[Sequence[Text]]) -> HostStep:
    packed, fields = new_buffer(bucket.shapes)
    fields["texts"][...] = -1
    texts: list[Text] = []
    num_tokens = 0
    for row, in_row in enumerate(rows):
        start = 0
        for text in in_row:
            num, number = len(text.token_ids), len(texts)
            place = (row, slice(start, start + num))
            fields["token_ids"][place] = text.token_ids
            fields["positions"][place] = np.arange(num)
            fields["token_types"][row, start + text.second_from : start + num] = 1
            fields["texts"][place] = number
            fields["first"][number] = row * bucket.row_len + start
            texts.append(text)
            start += num
        num_tokens += start
    return HostStep(bucket, packed, tuple(texts), num_tokens)


@dataclass(frozen=True)
class TokenBucket:
    """A ragged batch over pages: `num_tokens` of `num_texts` texts.

    A text's pages follow one another, so that its first one says them all.
    """

    num_tokens: int
    num_texts: int
    pages_per_text: int

    @property
    def name(self) -> str:
        return f"tokens {self.num_tokens} {self.num_texts} {self.pages_per_text}"

    @property
    def shapes(self) -> Shapes:
        tokens = dict.fromkeys(("token_ids", "positions", "slot_mapping"), (self.num_tokens,))
        return tokens | {
            "first_page": (self.num_texts,),
            "kv_lens": (self.num_texts,),
            "cu_q_lens": (self.num_texts + 1,),
        }


class TokenPacker:
    """Steps of a decoder. Pages are handed out anew in every step, but for the chunks of a text."""

    def __init__(self, max_len: int, max_tokens: int, page_size: int):
        self._page_size, self._pages_per_text = page_size, -(-max_len // page_size)
        self.buckets = [
            TokenBucket(tokens, max(1, tokens // TOKENS_A_TEXT), self._pages_per_text)
            for tokens in _ladder(max_tokens)
        ]
        largest = self.buckets[-1]
        many = largest.num_texts + -(-largest.num_tokens // page_size)
        self.num_pages = 1 + max(self._pages_per_text, many)

    def steps(self, queue: TextQueue) -> list[HostStep]:
        largest = self.buckets[-1]
        room, taken, left = largest.num_tokens, list[Text](), list[Text]()
        for text in queue.take(2 * largest.num_texts):
            num = len(text.token_ids)
            if not taken and num > room:
                taken, room = [text], 0
            elif num <= room and len(taken) < largest.num_texts:
                taken.append(text)
                room -= num
            else:
                left.append(text)
        queue.put_back(left)
        if not taken:
            return []
        most, num_tokens = largest.num_tokens, sum(len(text.token_ids) for text in taken)
        if num_tokens <= most:
            return [self._step(taken, 0, num_tokens)]
        chunks = [(start, min(start + most, num_tokens)) for start in range(0, num_tokens, most)]
        return [self._step(taken, *chunk) for chunk in chunks]

    def _step(self, texts: Sequence[Text], start: int, stop: int) -> HostStep:
        """Whole texts, or tokens `start : stop` of the only one."""
        num_tokens = stop - start
        bucket = next(
            bucket
            for bucket in self.buckets
            if bucket.num_tokens >= num_tokens and bucket.num_texts >= len(texts)
        )
        packed, fields = new_buffer(bucket.shapes)
        size, place, page_id = self._page_size, 0, 1
        for row, text in enumerate(texts):
            ids = text.token_ids[start:stop] if start or len(texts) == 1 else text.token_ids
            end = start + len(ids)
            here, places = slice(place, place + len(ids)), np.arange(start, end)
            fields["token_ids"][here] = ids
            fields["positions"][here] = places
            fields["slot_mapping"][here] = page_id * size + places
            num_pages = -(-end // size)
            fields["first_page"][row] = page_id
            fields["kv_lens"][row] = end
            place, page_id = place + len(ids), page_id + num_pages
            fields["cu_q_lens"][row + 1 :] = place
        is_last = stop == sum(len(text.token_ids) for text in texts)
        return HostStep(bucket, packed, tuple(texts) if is_last else (), num_tokens)


def new_buffer(shapes: Shapes) -> tuple[NDArray[np.int32], dict[str, NDArray[np.int32]]]:
    """A buffer of zeros for these fields, and views into it."""
    places = field_places(shapes)
    buffer = np.zeros(buffer_size(shapes), np.int32)
    return buffer, {name: buffer[place].reshape(shapes[name]) for name, place in places.items()}


def field_places(shapes: Shapes) -> dict[str, slice]:
    """Where each field lies in the buffer."""
    places: dict[str, slice] = {}
    start = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        places[name] = slice(start, start + size)
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return places


def buffer_size(shapes: Shapes) -> int:
    return max(place.stop for place in field_places(shapes).values())


def _ladder(most: int) -> list[int]:
    """Tokens a step: powers of 4 from the fewest on, and `most`."""
    return [*_powers(FEWEST_TOKENS, most), most]


def _powers(start: int, below: int) -> list[int]:
    powers: list[int] = []
    while start < below:
        powers.append(start)
        start *= 4
    return powers
