"""What a residual addition followed by a norm means."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*rows embed"], scale: Float[Array, " embed"], *, eps: float
) -> Float[Array, "*rows embed"]:
    """Divide by the root mean square over the last axis, then scale: in float32, in x's type."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    factor = scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * lax.rsqrt(mean_square + eps) * factor).astype(x.dtype)


def whole(
    x: Float[Array, "rows embed"] | Float[Array, "parts padded embed"],
    like: Float[Array, "rows embed"],
) -> Float[Array, "rows embed"]:
    """`x` itself, or the sum of its parts, rounded to the type of `like`."""
    if x.ndim == 2:
        return x
    return jnp.sum(x[:, : len(like)], axis=0).astype(like.dtype)


def add_rms_norm_reference(
    x: Float[Array, "rows embed"] | Float[Array, "parts padded embed"],
    residual: Float[Array, "rows embed"],
    scale: Float[Array, " embed"],
    *,
    eps: float,
) -> tuple[Float[Array, "rows embed"], Float[Array, "rows embed"]]:
    """The definition of `add_rms_norm`."""
    total = residual + whole(x, residual)
    return rms_norm(total, scale, eps=eps), total
