"""Tile sizes of the Mosaic GPU kernels on Hopper, and what they support."""

import os
from dataclasses import dataclass, replace
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
    """Shape of the decode kernel: pairs of a loading and a computing warpgroup."""

    block_kv: int  # tokens a tile
    k_stages: int  # tiles of K in flight, a pair
    v_stages: int
    pairs: int  # a multiprocessor
    min_tiles: int  # a pair gets no fewer, so that merging parts stays worth it


@dataclass(frozen=True)
class MixedTiles:
    """Shape of the mixed kernel: computing warpgroups of 64 rows share tiles of K and V."""

    warpgroups: int  # that compute
    block_kv: int  # tokens a tile
    stages: int  # tiles in flight


@dataclass(frozen=True)
class SearchTiles:
    """Shape of the sampler's search: a program a row."""

    warpgroups: int
    loads: int  # of 16 bytes in flight, a thread
    held: int  # logits that a thread can hold in shared memory


@dataclass(frozen=True)
class ProductTiles:
    """Shape of a product: computing warpgroups one below the other share the weights."""

    warpgroups: int  # that compute
    rows: int  # tokens a warpgroup
    columns: int  # of the result: a multiple of 16, up to 256, of a gated product 128
    stages: int  # loads in flight
    parts: int = 1  # of the contracted axis

    @property
    def block_rows(self) -> int:
        return self.warpgroups * self.rows


@dataclass(frozen=True)
class ThinTiles:
    """Shape of a product of few tokens."""

    stages: int  # loads in flight
    parts: int  # of the contracted axis


DECODE = {
    64: DecodeTiles(64, 6, 6, pairs=2, min_tiles=2),
    96: DecodeTiles(64, 4, 4, pairs=2, min_tiles=2),
    128: DecodeTiles(64, 3, 3, pairs=2, min_tiles=2),
    256: DecodeTiles(64, 3, 3, pairs=1, min_tiles=2),
}

_MIXED = {
    64: MixedTiles(2, 128, 4),
    96: MixedTiles(2, 64, 4),
    128: MixedTiles(2, 64, 4),
    256: MixedTiles(1, 64, 2),
}

# Large tiles multiply faster, small ones hide the memory's latency better: for batches of few long
# chunks, and for the others.
_LONG_CHUNKS = {128: MixedTiles(2, 128, 2)}
_LONG_CHUNK_TOKENS = 256  # a row, on average


def is_16_bit(dtype: DTypeLike) -> bool:
    """Whether it is one of the two floating-point types of 16 bits."""
    return jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


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
    group = heads // kv_heads
    return (
        is_16_bit(dtype)
        and head_dim in HEAD_DIMS
        and group <= MAX_GROUP
        # a copy from shared memory starts at a multiple of 128 bytes, at every token's heads
        and (group == 1 or group * head_dim % 64 == 0)
        and page_size in PAGE_SIZES
    )


def decode_tiles(head_dim: int, group: int) -> DecodeTiles:
    tiles = DECODE[head_dim]
    # queries and results of more than eight heads take the place of a tile
    return tiles if group <= 8 else replace(tiles, v_stages=tiles.v_stages - 1)


def mixed_tiles(head_dim: int, *, tokens: int, seqs: int) -> MixedTiles:
    if tokens >= _LONG_CHUNK_TOKENS * seqs and head_dim in _LONG_CHUNKS:
        return _LONG_CHUNKS[head_dim]
    return _MIXED[head_dim]


PRODUCT_BLOCK = 64  # of the contracted axis: 128 bytes, the widest swizzle
PRODUCT_ROWS = 128  # a tile's tokens, of two warpgroups
# with fewer tokens, or more of a tile's rows empty, the library's product and the activation apart
# are as fast
MIN_PRODUCT_TOKENS, MAX_EMPTY_ROWS = 128, 0.25


def _fills_tiles(tokens: int, dtype: DTypeLike) -> bool:
    fills = tokens % 8 == 0 and -tokens % PRODUCT_ROWS <= MAX_EMPTY_ROWS * tokens
    return fills and is_16_bit(dtype)


def supports_gated_product(
    tokens: int, *, ffn: int, embed: int, activation: str, dtype: DTypeLike
) -> bool:
    """Whether a gated product is one kernel: it takes these, and is faster than two."""
    return (
        _fills_tiles(tokens, dtype)
        and tokens >= MIN_PRODUCT_TOKENS
        and ffn % PRODUCT_BLOCK == embed % PRODUCT_BLOCK == 0
        and activation in ("silu", "gelu_tanh")
    )


def gated_product_tiles(tokens: int, ffn: int) -> ProductTiles:
    """The widest tiles, or narrower ones where fewer are left over in the last round."""

    def rounds(columns: int) -> int:
        return -(-(-(-tokens // PRODUCT_ROWS) * -(-ffn // columns)) // MULTIPROCESSORS)

    columns = min((128, 112, 96, 80), key=lambda columns: rounds(columns) * (columns + 8))
    return ProductTiles(2, PRODUCT_ROWS // 2, columns, stages=4)


PARTS, MIN_SPLIT_INNER = 2, 8192  # of the contracted axis, where writing two sums pays
MIN_FILLED = 0.95  # of the multiprocessors
SHARED_BYTES = 227 * 1024 - 1024  # of a multiprocessor, less what barriers take


def part_tiles(tokens: int, columns: int, inner: int, dtype: DTypeLike) -> ProductTiles | None:
    """Tiles of a product in parts, where it is faster than the library's and adding up.

    That is so where two tiles of rows, in two parts, fill all multiprocessors once.
    """
    rows = -(-tokens // PRODUCT_ROWS)
    if not _fills_tiles(tokens, dtype) or rows != 2:
        return None
    if inner % PRODUCT_BLOCK or inner < MIN_SPLIT_INNER:
        return None
    for width in (256, 192, 160, 128, 112):
        units = rows * columns // width * PARTS
        if columns % width == 0 and MIN_FILLED <= units / MULTIPROCESSORS <= 1:
            stage = (PRODUCT_ROWS + width) * PRODUCT_BLOCK * 2
            return ProductTiles(2, PRODUCT_ROWS // 2, width, SHARED_BYTES // stage, PARTS)
    return None


# With fewer tokens the library's products of the whole read weights as fast, with more the tokens,
# which every program loads, are more than the weights.
THIN_TOKENS = 33, 64
THIN_COLUMNS = 64  # a program's rows of weights: those of a product on the tensor cores


def thin_tiles(tokens: int, columns: int, inner: int, dtype: DTypeLike) -> ThinTiles | None:
    """Tiles of a product of few tokens in parts, the parts being such that all programs end
    together; None where it is not faster than the library's.
    """
    least, most = THIN_TOKENS
    if not (least <= tokens <= most and is_16_bit(dtype)):
        return None
    if tokens % 8 or columns % THIN_COLUMNS or inner % PRODUCT_BLOCK:
        return None
    column_tiles, blocks = columns // THIN_COLUMNS, inner // PRODUCT_BLOCK

    def loads(parts: int) -> int:  # of the longest program, a part's begin counted as eight
        return -(-column_tiles * parts // MULTIPROCESSORS) * (blocks // parts + 8)

    parts = min((n for n in (1, 2, 3, 4) if blocks % n == 0), key=loads)
    stage = (THIN_COLUMNS + tokens) * PRODUCT_BLOCK * 2
    return ThinTiles((SHARED_BYTES - tokens * THIN_COLUMNS * 4) // stage, parts)


ONE_ROW_IN_FLIGHT = 9  # loads, a program: with more, all else that is read comes late
ONE_ROW_COUNTERS = 4
ONE_ROW_WIDTH, ONE_ROW_PARTS = 6144, 8  # of a row that a warpgroup holds; parts at most


def _possible_parts(inner: int) -> list[int]:
    blocks, most = inner // PRODUCT_BLOCK, ONE_ROW_WIDTH // PRODUCT_BLOCK
    return [n for n in range(1, ONE_ROW_PARTS + 1) if blocks % n == 0 and blocks <= most * n]


def supports_one_row(columns: int, inner: int, dtype: DTypeLike) -> bool:
    """Whether one row's product with such a weight can be part of a chain of them."""
    fits = columns % THIN_COLUMNS == inner % PRODUCT_BLOCK == 0 and is_16_bit(dtype)
    return fits and bool(_possible_parts(inner))


def one_row_parts(columns: int, inner: int) -> int:
    """Parts of the contracted axis of one row's product: all programs end about together."""
    tiles, blocks = columns // THIN_COLUMNS, inner // PRODUCT_BLOCK

    def loads(parts: int) -> int:  # of the longest program, and what adding up a part costs all
        return -(-tiles // (MULTIPROCESSORS // parts)) * (blocks // parts) + 3 * parts

    return min(_possible_parts(inner), key=loads)


SEARCH = SearchTiles(warpgroups=8, loads=4, held=48)
SEARCHES_BY_KERNEL = True  # else XLA searches on Hopper as well


@cache
def hopper_available() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0."""
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


@cache
def runs_together() -> bool:
    """Whether as many programs as `MULTIPROCESSORS` run at the same time for certain.

    Programs that wait for each other would else wait for ever: on a smaller card, or where the
    card is shared by NVIDIA's Multi-Process Service with another process that does the same.
    """
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    is_shared = os.path.exists(os.path.join(pipes, "control"))
    return not is_shared and getattr(jax.devices()[0], "core_count", 0) >= MULTIPROCESSORS


def is_on_hopper() -> bool:
    """Whether what is traced here runs on such a GPU.

    Kernels are imported only then: they need Mosaic GPU, which not every jaxlib carries.
    """
    return jax.default_backend() == "gpu" and hopper_available()
