"""The header of a GGUF file, in Python integers, each bounded by the file's size before use."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxpaged.errors import WeightsError
from jaxpaged.weights.source import TensorInfo, clip

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_DIMS, MAX_NAME_BYTES, MAX_ALIGNMENT, MAX_DEPTH = 4, 512, 2**16, 4
MIN_FIELD_BYTES = 8 + 4 + 1  # length of a name, type, value
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # length of a name, dims, one dim, type, offset
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """`metadata` holds numbers, strings and lists of numbers; lists of strings are left out."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]  # shapes as in NumPy, outermost axis first


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the file at `path`.

    Raises:
        WeightsError: no GGUF file, or one whose header cannot be true.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise WeightsError(clip(f"{path.name} is too short for a GGUF file"))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path.name, data).header()
    except OSError as error:
        raise WeightsError(clip(f"{path.name} cannot be read: {error.strerror}")) from error


class _Reader:
    """A place in the file. Nothing is read or allocated before its length is known to fit."""

    def __init__(self, label: str, data: mmap.mmap):
        self.label, self.data, self.at = label, data, 0

    def header(self) -> GgufHeader:
        magic = self.take(4, "the magic number")
        if magic != MAGIC:
            self.refuse(f"it begins with {magic!r}, a GGUF file with {MAGIC!r}")
        version = self.number("<I", "the version")
        if version not in VERSIONS:
            self.refuse(f"its version is {version}, read are {VERSIONS[0]} and {VERSIONS[1]}")
        num_tensors = self.count("tensors", MIN_TENSOR_BYTES)
        num_fields = self.count("metadata fields", MIN_FIELD_BYTES)
        metadata = self.metadata(num_fields)
        alignment = metadata.get("general.alignment", 32)
        is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        if not is_power or alignment > MAX_ALIGNMENT:
            self.refuse(
                f"general.alignment is {alignment!r}, allowed are powers of 2 up to {MAX_ALIGNMENT}"
            )
        described = [self.tensor(alignment) for _ in range(num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, self.placed(described, data_start))

    def metadata(self, num_fields: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self.string("a metadata field's name", MAX_NAME_BYTES)
            if name in metadata:
                self.refuse(f"the field {name} stands there twice")
            metadata[name] = self.value(self.number("<I", name), name)
        return {name: value for name, value in metadata.items() if value is not None}

    def value(self, kind: int, name: str) -> Any:
        if kind == STRING:
            return self.string(name, len(self.data))
        if kind == ARRAY:
            return self.array(name, 1)
        if kind not in SCALARS:
            self.refuse(f"{name} has the unknown value type {kind}")
        return self.number(SCALARS[kind], name)

    def array(self, name: str, depth: int) -> list[Any] | None:
        if depth > MAX_DEPTH:
            self.refuse(f"{name} nests arrays over {MAX_DEPTH} deep")
        kind = self.number("<I", name)
        if kind in SCALARS:
            size = struct.calcsize(SCALARS[kind])
            count = self.count(f"values of {name}", size)
            return list(struct.unpack(f"<{count}{SCALARS[kind][1]}", self.take(count * size, name)))
        if kind not in (STRING, ARRAY):
            self.refuse(f"{name} has the unknown value type {kind}")
        for _ in range(self.count(f"values of {name}", 8)):
            if kind == STRING:
                self.skip(self.number("<Q", name), name)
            else:
                self.array(name, depth + 1)
        return None

    def tensor(self, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor described."""
        name = self.string("a tensor's name", MAX_NAME_BYTES)
        num_dims = self.number("<I", name)
        if not 1 <= num_dims <= MAX_DIMS:
            self.refuse(f"{name} has {num_dims} dimensions, allowed are 1 to {MAX_DIMS}")
        shape = tuple(self.number("<Q", name) for _ in range(num_dims))[::-1]
        if 0 in shape:
            self.refuse(f"{name} has the shape {shape}, which holds nothing")
        kind, offset = self.number("<I", name), self.number("<Q", name)
        if offset % alignment:
            self.refuse(f"{name} begins at offset {offset}, no multiple of {alignment}")
        return name, shape, kind, offset

    def placed(
        self, described: list[tuple[str, tuple[int, ...], int, int]], data_start: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        end = data_start
        for name, shape, kind, offset in sorted(described, key=lambda tensor: tensor[3]):
            num_bytes = self.num_bytes(name, shape, kind)
            start = data_start + offset
            if start + num_bytes > len(self.data):
                self.refuse(
                    f"{name} ends at byte {start + num_bytes} and the file at {len(self.data)}"
                )
            if start < end:
                self.refuse(f"{name} overlaps the tensor before it")
            if name in tensors:
                self.refuse(f"the tensor {name} stands there twice")
            end = start + num_bytes
            tensors[name] = TensorInfo(shape, GGMLQuantizationType(kind).name, start, end)
        return tensors

    def num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        if kind not in GGML_QUANT_SIZES:
            self.refuse(f"{name} has the unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape[-1] % block:
            self.refuse(f"{name} has rows of {shape[-1]}, its type packs {block} values at a time")
        return math.prod(shape) // block * block_bytes

    def count(self, what: str, least_bytes: int) -> int:
        """How many follow, each of at least so many bytes."""
        count = self.number("<Q", what)
        if count * least_bytes > len(self.data) - self.at:
            self.refuse(f"it claims {count} {what}, more than it can hold")
        return count

    def string(self, what: str, most: int) -> str:
        length = self.number("<Q", what)
        if length > most:
            self.refuse(f"{what} is {length} bytes long, at most {most} fit")
        return self.take(length, what).decode("utf-8", "replace")

    def number(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def take(self, length: int, what: str) -> bytes:
        start = self.at
        self.skip(length, what)
        return self.data[start : self.at]

    def skip(self, length: int, what: str) -> None:
        if length > len(self.data) - self.at:
            self.refuse(
                f"{what} needs {length} bytes at {self.at} and the file ends at {len(self.data)}"
            )
        self.at += length

    def refuse(self, what: str) -> NoReturn:
        raise WeightsError(clip(f"{self.label} is damaged: {what}"))
