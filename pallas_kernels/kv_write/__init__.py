"""Writing a step's K and V into their pages."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.kv_write.reference import kv_write_reference

__all__ = ["kv_write", "kv_write_reference"]

_OP = "kv_write"


def kv_write(
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> tuple[
    Float[Array, "pages kv_heads page_size head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
]:
    """Put each token's K and V into its slot, `page_id * page_size + offset`.

    In place when the pages are donated, and then O(tokens). Padding tokens name slot 0, in the
    null page, and overwrite each other there in any order; other slots must be named once. Slots
    past the pool are dropped.

    Args:
        k, v: in the pages' type: cast before.
        slot_mapping: not negative. Slots fit 31 bits; the pool's elements need not.

    Raises:
        KernelArgumentError: shapes that do not fit together, or another type; while tracing.
    """
    pages = ("pages", "kv_heads", "page_size", "head_dim")
    rows = ("tokens", "kv_heads", "head_dim")
    sizes = checks.check_shapes(
        _OP,
        {
            "k_pages": (k_pages, pages),
            "v_pages": (v_pages, pages),
            "k": (k, rows),
            "v": (v, rows),
            "slot_mapping": (slot_mapping, ("tokens",)),
        },
    )
    checks.check_dtype(_OP, "k_pages", k_pages, checks.KV_TYPES)
    for name, array in (("v_pages", v_pages), ("k", k), ("v", v)):
        checks.check_dtype(_OP, name, array, (k_pages.dtype,))
    checks.check_dtype(_OP, "slot_mapping", slot_mapping, ("int32",))

    page_size = jnp.int32(sizes["page_size"])
    page, offset = lax.div(slot_mapping, page_size), lax.rem(slot_mapping, page_size)
    return (
        k_pages.at[page, :, offset].set(k, mode="drop"),
        v_pages.at[page, :, offset].set(v, mode="drop"),
    )
