"""Lower kernels for CUDA on a machine without a GPU, as an H200 would have them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lower_for_cuda(function: Callable[..., Any], *args: Any) -> str:
    """The module's text. Raises what lowering raises: bad layouts, too much shared memory."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
