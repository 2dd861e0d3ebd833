"""Places for a step's small arrays in a GPU's memory, so that its temporaries stay where they are.

XLA records the launches of a program in CUDA graphs, and before each run renews those whose buffers
have moved: for a decode step that takes the host 2 to 4 ms. What moves its temporaries are the
step's packed words, cut now here, now there from the free memory that the temporaries come from.
Holes of about their sizes, each walled in by an allocation, take the words instead.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import numpy as np

GRAIN = 256  # bytes that XLA's allocator rounds up to
LARGEST = 1 << 24  # bytes of the largest hole: larger words are rare, and memory is dear
NUM_ALIKE = 4  # holes of a size: steps on their way, the one being built, and one to spare
MAX_TRIES = 64  # walls until one stands where it should: older gaps take the first ones


class Placed(Protocol):
    """An array on one device."""

    def unsafe_buffer_pointer(self) -> int: ...
    def delete(self) -> None: ...


def wall_in(devices: Iterable[Any], largest: int) -> list[Placed]:
    """Leave holes for buffers of up to `largest` bytes on each GPU; the walls, which must be kept.

    To be called when all that stays as long as the engine is there.
    """
    walls: list[Placed] = []
    for device in sorted(devices, key=lambda device: device.id):
        if device.platform == "gpu":

            def put(num_bytes: int, device: Any = device) -> Any:
                return jax.device_put(np.zeros(num_bytes, np.uint8), device)

            walls += make_holes(put, largest)
    return walls


def make_holes(put: Callable[[int], Any], largest: int) -> list[Placed]:
    """Leave holes of all powers of two up to `largest` bytes; the walls, which must be kept.

    The allocator is taken to give the smallest gap that is large enough, from its beginning, as
    XLA's does.

    Args:
        put: allocates so many bytes.
    """
    walls: list[Placed] = []
    holes: list[Placed] = []
    size = GRAIN
    while True:
        for _ in range(NUM_ALIKE):
            hole = put(size)
            holes.append(hole)
            end = hole.unsafe_buffer_pointer() + size
            for _ in range(MAX_TRIES):
                walls.append(put(GRAIN))
                if walls[-1].unsafe_buffer_pointer() == end:
                    break
        if size >= min(largest, LARGEST):
            break
        size *= 2
    for hole in holes:
        hole.delete()
    return walls
