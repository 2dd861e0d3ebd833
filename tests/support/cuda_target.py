"""Lowering for an H200 on a machine without a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.typing import DTypeLike

from pallas_kernels import tuning

KERNEL = "custom_call @mosaic_gpu_v2"
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@contextlib.contextmanager
def hopper_target() -> Iterator[None]:
    """Let the ops choose as they would on a Hopper GPU, while tracing and lowering."""
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(tuning, "hopper_available", return_value=True),
        mock.patch.object(tuning, "runs_together", return_value=True),
        use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)),
    ):
        yield


def lower_for_hopper(function: Callable[..., object], *arguments: object, donate=()) -> str:
    """Trace `function` anew and return its program for CUDA as text."""
    with hopper_target():
        traced = jax.jit(lambda *args: function(*args), donate_argnums=donate).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def struct(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
