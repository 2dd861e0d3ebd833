"""Matrix products with weights stored as `[out, in]`, as checkpoints store them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.sharding import num_shards, sum_shards
from pallas_kernels.products import goes_in_parts, product_in_parts

FEW_ROWS = 16


def weight(rngs: nnx.Rngs, *shape: int, axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param:
    """Make a weight whose last axis is contracted, scaled so that outputs keep their variance.

    `axes` says what each axis means, in words of `sharding.MESH_AXES`.
    """
    scale = math.sqrt(3 / shape[-1])
    value = jax.random.uniform(rngs.params(), shape, dtype, -scale, scale)
    return nnx.Param(value, axes=axes)


def zeros(*shape: int, axes: tuple[str, ...], dtype: DTypeLike) -> nnx.Param:
    """Make a bias."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def linear(
    x: Float[Array, "tokens in"], weight: nnx.Param, bias: nnx.Param | None
) -> Float[Array, "tokens out"]:
    """Multiply by `weight` and add `bias`; the leading axes of `weight` come out as one.

    Sums are in float32 and stored in x's type.
    """
    y = contract_last(x, weight[...].reshape(-1, x.shape[-1]), x.dtype)
    return y if bias is None else y + bias[...].reshape(1, -1)


def linear_of_parts(
    x: Float[Array, "tokens in"], weight: nnx.Param, bias: nnx.Param | None
) -> Float[Array, "tokens out"]:
    """`linear` where the contracted axis may be split over devices: then one all-reduce."""
    y = sum_shards(linear(x, weight, None))
    return y if bias is None else y + bias[...].reshape(1, -1)


type Addend = Float[Array, "tokens out"] | Float[Array, "parts rows out"]
"""What is added to the residual: whole, or as float32 parts, with rows at their end to spare."""


def linear_to_add(
    x: Float[Array, "tokens in"], weight: nnx.Param, bias: nnx.Param | None, *, is_normed: bool
) -> Addend:
    """`linear_of_parts` for `RMSNorm.of_sum`: where that is faster, the norm adds the parts up.

    Not where it `is_normed` by itself before it is added.
    """
    may_split = not is_normed and bias is None and num_shards() == 1
    if may_split and goes_in_parts(x, weight[...]):
        return product_in_parts(x, weight[...])
    return linear_of_parts(x, weight, bias)


def contract_last(
    x: Float[Array, "rows in"], w: Float[Array, "out in"], dtype: DTypeLike
) -> Float[Array, "rows out"]:
    """Compute `x @ w.T` with sums in float32, in `dtype`."""
    dot = partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=dtype,
    )
    if x.shape[0] <= FEW_ROWS and jax.default_backend() == "cpu":
        # XLA's CPU product of few rows is twice as fast with the weights first, and the barrier
        # keeps XLA from turning it round again
        return jax.lax.optimization_barrier(dot(w, x)).T
    return dot(x, w)
