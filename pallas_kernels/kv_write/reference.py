"""What writing KV means: one token after the other."""

from jax import lax
from jaxtyping import Array, Float, Int32


def kv_write_reference(
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> tuple[
    Float[Array, "pages kv_heads page_size head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
]:
    """The definition of `kv_write`: a loop over tokens; the last to name a slot keeps it."""
    num_pages, _, page_size, _ = k_pages.shape

    def write_token(token, pools):
        slot = slot_mapping[token]
        page, offset = slot // page_size, slot % page_size

        def write(pool, rows):
            new = rows[token][None, :, None, :]
            written = lax.dynamic_update_slice(pool, new, (page, 0, offset, 0))
            return lax.select(page < num_pages, written, pool)

        return write(pools[0], k), write(pools[1], v)

    return lax.fori_loop(0, k.shape[0], write_token, (k_pages, v_pages))
