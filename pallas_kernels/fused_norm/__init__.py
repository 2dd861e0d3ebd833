"""Adding to the residual and normalising the sum, in one pass."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import checks, tuning
from pallas_kernels.fused_norm.reference import add_rms_norm_reference, rms_norm, whole

__all__ = ["add_rms_norm", "add_rms_norm_reference", "rms_norm", "whole"]

_OP = "add_rms_norm"


def add_rms_norm(
    x: Float[Array, "rows embed"] | Float[Array, "parts padded embed"],
    residual: Float[Array, "rows embed"],
    scale: Float[Array, " embed"],
    *,
    eps: float,
) -> tuple[Float[Array, "rows embed"], Float[Array, "rows embed"]]:
    """Return the RMS norm of `residual + x`, and the sum itself.

    Args:
        x: what a block adds to the residual, in the residual's type; or float32 parts, rows at
            their end to spare, whose sum rounded to that type it is.
        scale: float32, the whole factor.

    Returns:
        (normed, sum), in the type of the inputs. The sum is rounded to that type, and its norm is
        taken of the rounded values, in float32.

    Raises:
        KernelArgumentError: shapes that do not fit together, or another type; while tracing.

    Cost: reads all of x and residual once, writes both results once; one launch on a Hopper GPU.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    rows = ("rows", "embed")
    in_parts = x.ndim == 3
    added = (x, ("parts", "padded", "embed") if in_parts else rows)
    sizes = checks.check_shapes(
        _OP, {"x": added, "residual": (residual, rows), "scale": (scale, ("embed",))}
    )
    if in_parts and sizes["padded"] < sizes["rows"]:
        raise checks.KernelArgumentError(
            f"{_OP}: x has {sizes['padded']} rows a part, residual {sizes['rows']}, "
            "allowed: as many or more"
        )
    checks.check_dtype(_OP, "x", x, (jnp.float32,) if in_parts else checks.KV_TYPES)
    allowed = checks.KV_TYPES if in_parts else (x.dtype,)
    checks.check_dtype(_OP, "residual", residual, allowed)
    checks.check_dtype(_OP, "scale", scale, (jnp.float32,))
    if tuning.is_on_hopper():
        from pallas_kernels.fused_norm import kernel

        if kernel.supports(sizes["embed"], residual.dtype):
            return kernel.add_rms_norm_kernel(x, residual, scale, eps=eps)
    return add_rms_norm_reference(x, residual, scale, eps=eps)
