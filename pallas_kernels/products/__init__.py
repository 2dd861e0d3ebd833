"""The product of tokens and weights in parts of the contracted axis, to be added up by the norm."""

import jax
from jaxtyping import Array, Float

from pallas_kernels import checks

__all__ = ["goes_in_parts", "product_in_parts"]

_OP = "product_in_parts"


def goes_in_parts(x: Float[Array, "tokens inner"], weight: Float[Array, "columns inner"]) -> bool:
    """Whether `product_in_parts` takes these here, and is faster than a product as a whole."""
    if jax.default_backend() != "gpu":
        return False
    from pallas_kernels import tuning

    sizes = x.shape[0], weight.shape[0], x.shape[1]
    return tuning.hopper_available() and tuning.part_tiles(*sizes, x.dtype) is not None


def product_in_parts(
    x: Float[Array, "tokens inner"], weight: Float[Array, "columns inner"]
) -> Float[Array, "parts rows columns"]:
    """Return sums over parts of the contracted axis whose sum is `x @ weight.T`.

    Returns:
        float32; rows past the tokens are zeros.

    Raises:
        KernelArgumentError: shapes or types that `goes_in_parts` does not allow; while tracing.

    Cost: 2 * tokens * inner * columns operations, and 4 bytes a sum and part to write.
    """
    checks.check_shapes(_OP, {"x": (x, ("tokens", "inner")), "weight": (weight, ("out", "inner"))})
    checks.check_dtype(_OP, "weight", weight, (x.dtype,))
    if not goes_in_parts(x, weight):
        raise checks.KernelArgumentError(
            f"{_OP}: {x.shape} by {weight.shape} is not for the kernel here; "
            "ask goes_in_parts first"
        )
    from pallas_kernels.products.kernel import product_in_parts_kernel

    return product_in_parts_kernel(x, weight)
