"""What all Mosaic GPU kernels here share."""

import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

inline: Any = plgpu.inline_mgpu  # what it returns takes no context, which type checkers miss


def tiled(columns: int) -> tuple[Any, ...]:
    """Transforms of a shared-memory array of 16-bit values whose tiles the tensor cores read."""
    width = math.gcd(columns * 2, 128)  # bytes of a swizzled row: the largest that divides
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, width // 2)), swizzle(width)
