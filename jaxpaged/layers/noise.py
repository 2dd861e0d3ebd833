"""Gumbel noise over a vocabulary, of which a device of a mesh makes only its own part."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, UInt32

from jaxpaged.sharding import is_split, shard_index


def gumbel_noise(keys: Array, vocab: int) -> Float[Array, "rows vocab"]:
    """One key a row, `vocab` this device's part: a token's noise is the same on any mesh."""
    if not is_split():
        return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)
    first = jnp.uint32(shard_index() * vocab)
    return jax.vmap(lambda key: _gumbel_from(key, first, vocab))(jax.random.key_data(keys))


def _gumbel_from(
    key: UInt32[Array, " 2"], first: UInt32[Array, ""], count: int
) -> Float[Array, " count"]:
    """Elements `first : first + count` of what `jax.random.gumbel` makes of a threefry key."""
    places = first + jnp.arange(count, dtype=jnp.uint32)
    counts = jnp.concatenate([jnp.zeros_like(places), places])
    high, low = jnp.split(threefry_2x32((key[0], key[1]), counts), 2)
    # the mantissa of a float from 1 to 2
    unit = jax.lax.bitcast_convert_type(((high ^ low) >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    tiny = jnp.finfo(jnp.float32).tiny
    uniform = jnp.maximum(tiny, (unit - 1) * (1 - tiny) + tiny)
    return -jnp.log(-jnp.log(uniform))
