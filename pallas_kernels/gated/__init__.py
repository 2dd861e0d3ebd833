"""The product of an activated gate and its partner, of given ones or of weights by tokens."""

import jax
from jaxtyping import Array, Float

from pallas_kernels import checks
from pallas_kernels.gated.reference import gated_reference

__all__ = ["gated", "gated_product", "gated_reference", "is_one_kernel"]

_OP = "gated"
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated(both: Float[Array, "rows both"], *, activation: str) -> Float[Array, "rows ffn"]:
    """Return `act(gate) * up`, where each row of `both` is its gate, then its up.

    Args:
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        In the type of `both`; the arithmetic is float32.

    Raises:
        KernelArgumentError: rows of odd width, another type or activation; while tracing.

    Cost: reads `both` once and writes half as much; bandwidth-bound.
    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    sizes = checks.check_shapes(_OP, {"both": (both, ("rows", "both"))})
    checks.check_dtype(_OP, "both", both, checks.KV_TYPES)
    if sizes["both"] % 2:
        raise checks.KernelArgumentError(
            f"{_OP}: both has rows of {sizes['both']}, allowed: an even width, gate then up"
        )
    if activation not in _ACTIVATIONS:
        raise checks.KernelArgumentError(
            f"{_OP}: activation is {activation!r}, allowed: {', '.join(_ACTIVATIONS)}"
        )
    if jax.default_backend() == "gpu":
        # the kernels need Mosaic GPU, which not every jaxlib carries
        from pallas_kernels import tuning

        if tuning.hopper_available():
            from pallas_kernels.gated import kernel

            if kernel.supports(sizes["both"] // 2, activation, both.dtype):
                return kernel.gated_kernel(both, activation=activation)
    return gated_reference(both, activation=activation)


def is_one_kernel(
    x: Float[Array, "tokens embed"], weight: Float[Array, "two ffn embed"], *, activation: str
) -> bool:
    """Whether `gated_product` takes these here; else a product and `gated` are the way."""
    if jax.default_backend() != "gpu":
        return False
    from pallas_kernels import tuning

    (tokens, embed), ffn = x.shape, weight.shape[1]
    return tuning.hopper_available() and tuning.supports_product(
        tokens, ffn=ffn, embed=embed, activation=activation, dtype=x.dtype
    )


def gated_product(
    x: Float[Array, "tokens embed"], weight: Float[Array, "two ffn embed"], *, activation: str
) -> Float[Array, "tokens ffn"]:
    """Return `act(x @ weight[0].T) * (x @ weight[1].T)`, for what `is_one_kernel` allows.

    Args:
        activation: "silu" or "gelu_tanh".

    Returns:
        In the type of `x`; the sums and the activation are float32, so that it is rounded once.

    Raises:
        KernelArgumentError: shapes or types that do not fit; while tracing.

    Cost: 4 * tokens * embed * ffn operations; the products themselves are never written.
    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    shapes = {"x": (x, ("tokens", "embed")), "weight": (weight, ("two", "ffn", "embed"))}
    sizes = checks.check_shapes("gated_product", shapes)
    checks.check_dtype("gated_product", "weight", weight, (x.dtype,))
    if sizes["two"] != 2 or not is_one_kernel(x, weight, activation=activation):
        raise checks.KernelArgumentError(
            f"gated_product: {sizes} with {activation!r} is not for the kernel here; "
            "ask is_one_kernel first"
        )
    from pallas_kernels.products.kernel import gated_product_kernel

    return gated_product_kernel(x, weight, activation=activation)
