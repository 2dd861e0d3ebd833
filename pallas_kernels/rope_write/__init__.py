"""Turning queries and keys to their positions and writing KV into its pages, in one pass."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks, tuning
from pallas_kernels.rope_write.reference import HeadNorms, rotate, rotate_and_write_reference

__all__ = ["HeadNorms", "rotate", "rotate_and_write", "rotate_and_write_reference"]

_OP = "rotate_and_write"


def rotate_and_write(
    qkv: Float[Array, "tokens kv_heads blocks head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    slot_mapping: Int32[Array, " tokens"],
    *,
    norms: HeadNorms | None,
    eps: float,
    bias: Float[Array, "kv_heads blocks head_dim"] | None = None,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
]:
    """Turn each pair (i, i + head_dim / 2) of queries and keys; put K and V into their slots.

    Of a KV head's `blocks`, all but the last two are its query heads, then come its key and its
    value. A slot is `page_id * page_size + offset`. In place when the pages are donated. Padding
    tokens name slot 0, in the null page, and overwrite each other there in any order; other slots
    must be named once. Slots past the pool are dropped.

    Args:
        cos, sin: of each token's angles, float32.
        slot_mapping: not negative.
        norms: for models that norm each head before it is turned, the factors for q and for k.
        eps: of those norms; not read without them.
        bias: of each block, in qkv's type; added to queries, keys and values before all else, and
            the sums of queries and keys are not rounded before they are turned.

    Returns:
        (q, k_pages, v_pages) with q turned, not scaled, in the type of the pages. The arithmetic
        is float32.

    Raises:
        KernelArgumentError: shapes that do not fit together, or another type; while tracing.

    Cost: reads qkv once and writes as much; O(tokens), whatever the size of the pool.
    Source: Su et al. 2021 (arXiv 2104.09864).
    """
    _check(qkv, cos, sin, k_pages, v_pages, slot_mapping, norms, bias)
    arguments = (qkv, cos, sin, k_pages, v_pages, slot_mapping)
    if tuning.is_on_hopper():
        from pallas_kernels.rope_write import kernel

        head_dim, has_norms = qkv.shape[-1], norms is not None
        if qkv.dtype == k_pages.dtype and kernel.supports(head_dim, has_norms, qkv.dtype):
            return kernel.rotate_and_write_kernel(*arguments, norms=norms, eps=eps, bias=bias)
    return rotate_and_write_reference(*arguments, norms=norms, eps=eps, bias=bias)


def _check(qkv, cos, sin, k_pages, v_pages, slot_mapping, norms, bias) -> None:
    pages = ("pages", "kv_heads", "page_size", "head_dim")
    expected = {
        "qkv": (qkv, ("tokens", "kv_heads", "blocks", "head_dim")),
        "cos": (cos, ("tokens", "half")),
        "sin": (sin, ("tokens", "half")),
        "k_pages": (k_pages, pages),
        "v_pages": (v_pages, pages),
        "slot_mapping": (slot_mapping, ("tokens",)),
    }
    wide = {"cos": cos, "sin": sin}
    if norms is not None:
        wide |= {"norms[0]": norms[0], "norms[1]": norms[1]}
        expected |= {name: (wide[name], ("head_dim",)) for name in ("norms[0]", "norms[1]")}
    if bias is not None:
        expected["bias"] = bias, ("kv_heads", "blocks", "head_dim")
    sizes = checks.check_shapes(_OP, expected)
    if sizes["blocks"] < 3 or sizes["head_dim"] != 2 * sizes["half"]:
        raise checks.KernelArgumentError(
            f"{_OP}: qkv has shape {qkv.shape} and cos {cos.shape}, expected 3 or more blocks a "
            "KV head (query heads, key, value) and a head_dim of twice half"
        )
    checks.check_dtype(_OP, "qkv", qkv, checks.KV_TYPES)
    checks.check_dtype(_OP, "k_pages", k_pages, checks.KV_TYPES)
    checks.check_dtype(_OP, "v_pages", v_pages, (k_pages.dtype,))
    checks.check_dtype(_OP, "slot_mapping", slot_mapping, (jnp.int32,))
    if bias is not None:
        checks.check_dtype(_OP, "bias", bias, (qkv.dtype,))
    for name, array in wide.items():
        checks.check_dtype(_OP, name, array, (jnp.float32,))
