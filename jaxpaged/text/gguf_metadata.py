"""The key-value part of a GGUF file, read without touching its tensors.

Counts and lengths come from the file and are not believed: each is held against the file's size
before anything is read or allocated.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.errors import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class _Cursor:
    """A place in the file; every read moves it and is checked against the end."""

    def __init__(self, data: mmap.mmap, name: str):
        self.data, self.name, self.at = data, name, 0

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self.at
        if count > len(self.data) - start:
            raise WeightsError(
                f"{self.name}: {what} needs {count} bytes at offset {start}, the file has "
                f"{len(self.data) - start} left: it is cut off or damaged"
            )
        self.at = start + count
        return start

    def number(self, layout: str, what: str) -> int:
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        start = self.take(length, what)
        return self.data[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        return self._scalars(kind, 1, what)[0]

    def _array(self, what: str, depth: int) -> list[Any]:
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind not in (_STRING, _ARRAY):
            return self._scalars(kind, count, what)
        if depth >= MAX_ARRAY_DEPTH:
            raise WeightsError(f"{self.name}: {what} nests arrays over {MAX_ARRAY_DEPTH} deep")
        if count * 8 > len(self.data) - self.at:
            raise WeightsError(
                f"{self.name}: {what} claims {count} entries, more than the file holds"
            )
        if kind == _STRING:
            return [self.string(what) for _ in range(count)]
        return [self._array(what, depth + 1) for _ in range(count)]

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALARS:
            raise WeightsError(f"{self.name}: {what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).tolist()


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All keys of the file's metadata as plain Python values; arrays are lists.

    Raises:
        WeightsError: no GGUF file, another version, or counts that the file cannot hold.
    """
    path = Path(path)
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise WeightsError(f"{path.name}: too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_fields(_Cursor(data, path.name))


def _read_fields(cursor: _Cursor) -> dict[str, Any]:
    start = cursor.take(4, "the magic number")
    magic = cursor.data[start : start + 4]
    if magic != MAGIC:
        raise WeightsError(
            f"{cursor.name}: begins with {magic!r}, a GGUF file begins with {MAGIC!r}"
        )
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        raise WeightsError(f"{cursor.name}: GGUF version {version}, read are {VERSIONS}")
    cursor.number("<Q", "the tensor count")
    num_fields = cursor.number("<Q", "the field count")
    if num_fields * 13 > len(cursor.data):
        raise WeightsError(f"{cursor.name}: claims {num_fields} fields, more than the file holds")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.string("a field's name")
        fields[name] = cursor.value(cursor.number("<I", name), name)
    return fields
