"""Argument checks of the ops: raised while tracing, one clear line each."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.spec import AttentionSpec

KV_TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class KernelArgumentError(ValueError):
    """An argument that an op cannot work with: what, which, got, allowed, and what to do."""


def check_shapes(op: str, expected: Mapping[str, tuple[Array, tuple[str, ...]]]) -> dict[str, int]:
    """Match arrays with their dimension names and return the size of each name.

    `expected` maps an argument's name to the array and its dimensions; a name that comes back
    must have its first size, and `name+1` one more.

    Raises:
        KernelArgumentError: a wrong number of dimensions, or sizes that contradict each other.
    """
    sizes: dict[str, int] = {}
    for argument, (array, dims) in expected.items():
        if array.ndim != len(dims):
            raise KernelArgumentError(
                f"{op}: {argument} has shape {array.shape}, expected [{' '.join(dims)}]"
            )
        for dim, size in zip(dims, array.shape, strict=True):
            name, _, plus = dim.partition("+")
            size_of_name = size - int(plus or 0)
            if sizes.setdefault(name, size_of_name) != size_of_name:
                raise KernelArgumentError(
                    f"{op}: {argument} has shape {array.shape}, expected [{' '.join(dims)}] "
                    f"with {name} = {sizes[name]}"
                )
    return sizes


def check_dtype(op: str, argument: str, array: Array, allowed: Sequence[DTypeLike]) -> None:
    """Refuse an array of a type outside `allowed`.

    Raises:
        KernelArgumentError: another type.
    """
    names = [jnp.dtype(dtype).name for dtype in allowed]
    if array.dtype.name not in names:
        raise KernelArgumentError(
            f"{op}: {argument} is {array.dtype.name}, allowed: {', '.join(names)}; cast it before"
        )


def check_head_groups(op: str, heads: int, kv_heads: int) -> None:
    """Refuse heads that do not divide evenly among the KV heads.

    Raises:
        KernelArgumentError: no whole number of heads per KV head.
    """
    if kv_heads == 0 or heads % kv_heads:
        raise KernelArgumentError(
            f"{op}: q has {heads} heads and the pages {kv_heads} KV heads: "
            "heads must be a multiple of kv_heads"
        )


def check_attention_spec(op: str, spec: AttentionSpec) -> None:
    """Refuse a window that hides everything or a soft cap that is no limit.

    Raises:
        KernelArgumentError: window below 1 or soft_cap not above 0.
    """
    if spec.window is not None and spec.window < 1:
        raise KernelArgumentError(
            f"{op}: window is {spec.window}, allowed: 1 and over, or None for no window"
        )
    if spec.soft_cap is not None and not spec.soft_cap > 0:
        raise KernelArgumentError(
            f"{op}: soft_cap is {spec.soft_cap}, allowed: over 0, or None for no cap"
        )
