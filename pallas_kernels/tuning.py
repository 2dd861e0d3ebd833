"""Tile sizes of the Mosaic GPU kernels on Hopper, and what they support."""

import math
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.spec import AttentionSpec

MULTIPROCESSORS = 132  # of an H100 or H200 SXM; fewer at run time only costs balance
MAX_GROUP = 16
HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class DecodeTiles:
    """Shape of the decode kernel: `pairs` of a loading and a computing warpgroup a multiprocessor."""

    block_kv: int  # tokens a tile
    k_stages: int  # tiles of K in flight, a pair
    v_stages: int
    pairs: int
    q_in_registers: bool  # else in shared memory
    min_tiles: int  # a pair gets no fewer, so that merging splits stays worth it


@dataclass(frozen=True)
class MixedTiles:
    """Shape of the mixed kernel: two computing warpgroups of 64 rows share tiles of K and V."""

    block_kv: int
    stages: int


_DECODE = {
    64: DecodeTiles(64, 4, 4, pairs=2, q_in_registers=True, min_tiles=4),
    96: DecodeTiles(64, 3, 3, pairs=2, q_in_registers=True, min_tiles=4),
    128: DecodeTiles(64, 2, 2, pairs=2, q_in_registers=True, min_tiles=4),
    256: DecodeTiles(64, 2, 2, pairs=1, q_in_registers=False, min_tiles=4),
}

_MIXED = {
    64: MixedTiles(128, 4),
    96: MixedTiles(128, 2),
    128: MixedTiles(128, 2),
    256: MixedTiles(64, 2),
}


def supports(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: DTypeLike,
    spec: AttentionSpec | None = None,
) -> bool:
    """Whether there are tiles for these shapes; other shapes run on the XLA path. Every spec is."""
    del spec
    return (
        jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
        and head_dim in HEAD_DIMS
        and heads // kv_heads <= MAX_GROUP
        and page_size in PAGE_SIZES
    )


def decode_tiles(head_dim: int) -> DecodeTiles:
    return _DECODE[head_dim]


def mixed_tiles(head_dim: int) -> MixedTiles:
    return _MIXED[head_dim]


@cache
def hopper_available() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0."""
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


def swizzle_bytes(head_dim: int) -> int:
    """Bytes of a swizzled row of a tile of 2-byte values: the largest that divides the head."""
    return math.gcd(head_dim * 2, 128)
