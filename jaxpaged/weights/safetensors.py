"""Safetensors files, one or many: the header is checked before a byte of data is looked at."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxpaged.errors import WeightsError
from jaxpaged.weights.file_bytes import FileBytes, aligned
from jaxpaged.weights.source import TensorInfo, clip

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
READABLE = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class SafetensorsSource:
    """All tensors of a folder's safetensors files, read when asked for."""

    def __init__(self, folder: Path):
        self.label = folder.name
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, FileBytes] = {}
        if (folder / SINGLE).is_file():
            self._add(folder / SINGLE)
            return
        weight_map = _read_index(folder / INDEX)
        for file in sorted(set(weight_map.values())):
            self._add(folder / file)
        for name, file in weight_map.items():
            if name not in self.tensors:
                raise WeightsError(clip(f"{INDEX} places {name} in {file}, which does not hold it"))

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        shape, dtype = self.tensors[name].shape, self._dtype(name)
        out = aligned(math.prod(shape[1:]) * (stop - start) * dtype.itemsize).view(dtype)
        self.read_into(name, start, out)
        return out.reshape(stop - start, *shape[1:])

    def read_into(self, name: str, start: int, out: NDArray[Any]) -> bool:
        info, dtype = self.tensors[name], self._dtype(name)
        if out.dtype != dtype:
            return False
        row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
        self._files[name].read_into(out, info.start + start * row_bytes)
        return True

    def _dtype(self, name: str) -> np.dtype:
        dtype = self.tensors[name].dtype
        if dtype not in READABLE:
            known = ", ".join(READABLE)
            raise WeightsError(clip(f"{self.label}: {name} is {dtype}, read are {known}"))
        return READABLE[dtype]

    def _add(self, path: Path) -> None:
        infos = read_header(path)
        file = FileBytes(path)
        for name, info in infos.items():
            if name in self.tensors:
                raise WeightsError(clip(f"{path.name}: {name} stands in another file too"))
            self.tensors[name], self._files[name] = info, file


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one file.

    Raises:
        WeightsError: it is cut off, or says something that the file cannot hold.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"its header has {length} bytes and the file {size}")
            text = file.read(length)
    except OSError as error:
        raise WeightsError(clip(f"{path.name} cannot be read: {error.strerror}")) from error
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is no valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header is no mapping")
    header.pop("__metadata__", None)
    data_start = 8 + length
    infos = {name: _tensor_info(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, infos, data_start, size)
    return infos


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged(path, f"{name} is described by no mapping")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _damaged(path, f"{name} has the unknown dtype {dtype!r}")
    if not _are_counts(shape):
        raise _damaged(path, f"{name} has the shape {shape!r}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"{name} has the data_offsets {offsets!r}")
    start, stop = offsets
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != needed:
        raise _damaged(
            path, f"{name} has {stop - start} bytes, its shape {shape} in {dtype} needs {needed}"
        )
    return TensorInfo(tuple(shape), dtype, data_start + start, data_start + stop)


def _check_layout(path: Path, infos: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Tensors must fill the data from its beginning to the file's end, each byte owned once."""
    end = data_start
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.stop > size:
            raise _damaged(path, f"{name} ends at byte {info.stop} and the file at {size}")
        if info.start < end:
            raise _damaged(path, f"{name} overlaps the tensor before it")
        if info.start > end:
            raise _damaged(path, f"{info.start - end} bytes before {name} belong to no tensor")
        end = info.stop
    if end != size:
        raise _damaged(path, f"{size - end} bytes at its end belong to no tensor")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise WeightsError(clip(f"{path.name} cannot be read: {error.strerror}")) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no valid JSON ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(path, "it has no weight_map")
    for name, file in weight_map.items():
        # a plain name: an index may not reach out of its folder
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise _damaged(path, f"{name} is placed in {file!r}, which is no safetensors file here")
    return weight_map


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(clip(f"{path.name} is damaged: {what}"))
