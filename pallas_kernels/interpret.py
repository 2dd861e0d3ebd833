"""The Mosaic GPU interpreter: kernels on a CPU, values and races, for tests of small kernels.

It lacks `wgmma` with an operand in registers and semaphores in global memory, so the attention
kernels do not run in it. The one file of the package that may import private JAX modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Run the Mosaic GPU kernels called inside on the CPU.

    State that an exception leaves behind is thrown away, so the next use starts clean.
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the last kernel that was run inside `interpreted` had a race."""
    state = gpu_callbacks.get_races()
    return bool(state.races_found)
