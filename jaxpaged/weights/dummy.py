"""Random weights made on the devices, for measuring speed without a checkpoint."""

import math
import zlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32

from jaxpaged.arrays import Params
from jaxpaged.weights.placing import Destination


def random_params(abstract: Params, seed: int, device: Destination) -> Params:
    """Fill `abstract` with small random weights; norm scales lie round 1.

    Outputs of every product keep about the variance of their inputs, so logits are finite and
    differ. Cost: one pass of memory writes, one compiled program per shape.
    """

    def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path)
        word = jnp.uint32(zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF))
        middle = 1.0 if name.endswith("['scale']") else 0.0
        width = 0.1 if len(shape.shape) == 1 else math.sqrt(3 / shape.shape[-1])
        sizes = (shape.shape, shape.dtype, middle, width)
        if shape.sharding is not None:  # each device makes its own part
            return _maker(shape.sharding)(word, *sizes)
        return jax.device_put(_uniform(word, *sizes), device)

    return jax.tree_util.tree_map_with_path(leaf, abstract)


@cache
def _maker(sharding: jax.sharding.Sharding) -> Callable[..., Array]:
    return jax.jit(_uniform, static_argnums=(1, 2, 3, 4), out_shardings=sharding)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _uniform(
    word: UInt32[Array, ""], shape: tuple[int, ...], dtype: DTypeLike, middle: float, width: float
) -> Array:
    # a hash of the element's number is random enough here and costs no memory beside the result
    number = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        number += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    bits = number ^ word
    for multiplier in (0x7FEB352D, 0x846CA68B):  # the "lowbias32" mixer of C. Wellons
        bits = (bits ^ (bits >> 16)) * jnp.uint32(multiplier)
    unit = (bits ^ (bits >> 15)).astype(jnp.float32) * jnp.float32(2.0**-32)
    return (jnp.float32(middle) + jnp.float32(width) * (2 * unit - 1)).astype(dtype)
