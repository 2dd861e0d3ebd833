"""Bytes of a file by their place, read from many threads at once."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxpaged.errors import WeightsError
from jaxpaged.weights.source import clip

ALIGNMENT = 64  # what lets a CPU device take a buffer as it is


class FileBytes:
    """An open file. It is read and not mapped.

    So what was read is not counted as ours any more, and a file that becomes shorter is an error
    where a mapped one would end the process.
    """

    def __init__(self, path: Path):
        self._name = path.name
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise WeightsError(clip(f"{path.name} cannot be read: {error.strerror}")) from error
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self.read_into(aligned(stop - start), start)

    def read_into(self, out: NDArray[Any], start: int) -> NDArray[Any]:
        """Fill `out`, which is contiguous, with the bytes from `start`."""
        rest = memoryview(out.reshape(-1).view(np.uint8))
        while rest:
            try:
                count = os.preadv(self._file, [rest], start)
            except OSError as error:
                what = f"{self._name} cannot be read: {error.strerror}"
                raise WeightsError(clip(what)) from error
            if not count:
                raise WeightsError(
                    clip(f"{self._name} was cut off at byte {start} while it was read")
                )
            rest, start = rest[count:], start + count
        return out


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins where a device's own would."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]
