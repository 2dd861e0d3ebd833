"""Ranges of characters as ranges of UTF-8 bytes."""

from collections.abc import Iterable, Iterator

from jaxpaged.text.grammars.expressions import SURROGATES

type ByteRange = tuple[int, int]

_BORDERS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # the last character of each length


def byte_ranges(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[ByteRange, ...]]:
    """Paths of byte ranges that together match exactly the characters of `ranges`."""
    for low, high in _without_surrogates(ranges):
        first = low
        for border in _BORDERS:
            if first > min(high, border):
                continue
            last = min(high, border)
            yield from _paths(chr(first).encode(), chr(last).encode())
            first = last + 1


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        first, last = SURROGATES
        if low < first:
            yield low, min(high, first - 1)
        if high > last:
            yield max(low, last + 1), high


def _paths(low: bytes, high: bytes) -> Iterator[tuple[ByteRange, ...]]:
    """Split until each place has a range of its own; both ends are of one length."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    lowest, highest = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    if low[0] == high[0]:
        yield from (((low[0], low[0]), *rest) for rest in _paths(low[1:], high[1:]))
        return
    first, last = low[0], high[0]
    if low[1:] != lowest:
        yield from (((first, first), *rest) for rest in _paths(low[1:], highest))
        first += 1
    tail = (((last, last), *rest) for rest in _paths(lowest, high[1:]))
    is_whole = high[1:] == highest
    if first <= last - (not is_whole):
        yield ((first, last - (not is_whole)), *((0x80, 0xBF),) * (len(low) - 1))
    if not is_whole:
        yield from tail
