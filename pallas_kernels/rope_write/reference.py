"""What turning queries and keys and writing KV means, in jax.numpy."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.fused_norm.reference import rms_norm
from pallas_kernels.kv_write import kv_write

type HeadNorms = tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]]
"""Factors of the RMS norm of each query head, and of each key head, float32."""


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Turn each pair (i, i + head_dim / 2) of `x` by its angle, in float32, stored in x's type."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rotate_and_write_reference(
    qkv: Float[Array, "tokens kv_heads blocks head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    slot_mapping: Int32[Array, " tokens"],
    *,
    norms: HeadNorms | None,
    eps: float,
    bias: Float[Array, "kv_heads blocks head_dim"] | None,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
]:
    """The definition of `rotate_and_write`."""
    tokens, _, blocks, head_dim = qkv.shape
    if bias is not None:
        qkv = qkv.astype(jnp.float32) + bias[None].astype(jnp.float32)
    q = qkv[:, :, : blocks - 2].reshape(tokens, -1, head_dim)
    k, v = qkv[:, :, blocks - 2], qkv[:, :, blocks - 1]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps=eps), rms_norm(k, norms[1], eps=eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    dtype = k_pages.dtype
    return (
        q.astype(dtype),
        *kv_write(k_pages, v_pages, k.astype(dtype), v.astype(dtype), slot_mapping),
    )
