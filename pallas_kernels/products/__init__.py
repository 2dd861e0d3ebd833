"""Products of tokens and weights with kernels of their own, where these beat the library's.

Each has a question to ask first: shapes, types and devices that it does not take are for the
library.
"""

from jaxtyping import Array, Float

from pallas_kernels import checks, tuning

__all__ = ["gated_product", "gates_in_product", "goes_in_parts", "product_in_parts"]


def gates_in_product(
    x: Float[Array, "tokens embed"], weight: Float[Array, "two ffn embed"], *, activation: str
) -> bool:
    """Whether `gated_product` takes these here; else a product and `gated` are the way."""
    (tokens, embed), ffn = x.shape, weight.shape[1]
    sizes = {"ffn": ffn, "embed": embed, "activation": activation, "dtype": x.dtype}
    return tuning.is_on_hopper() and tuning.supports_gated_product(tokens, **sizes)


def gated_product(
    x: Float[Array, "tokens embed"], weight: Float[Array, "two ffn embed"], *, activation: str
) -> Float[Array, "tokens ffn"]:
    """Return `act(x @ weight[0].T) * (x @ weight[1].T)`, for what `gates_in_product` allows.

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
    if sizes["two"] != 2 or not gates_in_product(x, weight, activation=activation):
        raise checks.KernelArgumentError(
            f"gated_product: {sizes} with {activation!r} is not for the kernel here; "
            "ask gates_in_product first"
        )
    from pallas_kernels.products.kernel import gated_product_kernel

    return gated_product_kernel(x, weight, activation=activation)


def goes_in_parts(x: Float[Array, "tokens inner"], weight: Float[Array, "columns inner"]) -> bool:
    """Whether `product_in_parts` takes these here, and is faster than a product as a whole."""
    sizes = x.shape[0], weight.shape[0], x.shape[1], x.dtype
    tiles = tuning.part_tiles(*sizes) or tuning.thin_tiles(*sizes)
    return tuning.is_on_hopper() and tiles is not None


def product_in_parts(
    x: Float[Array, "tokens inner"], weight: Float[Array, "columns inner"]
) -> Float[Array, "parts rows columns"]:
    """Return sums over parts of the contracted axis, which `add_rms_norm` adds up.

    Returns:
        float32, together `x @ weight.T`; rows past the tokens are zeros.

    Raises:
        KernelArgumentError: shapes or types that `goes_in_parts` does not allow; while tracing.

    Cost: 2 * tokens * inner * columns operations, and 4 bytes a sum and part to write.
    """
    shapes = {"x": (x, ("tokens", "inner")), "weight": (weight, ("columns", "inner"))}
    sizes = checks.check_shapes("product_in_parts", shapes)
    checks.check_dtype("product_in_parts", "weight", weight, (x.dtype,))
    if not goes_in_parts(x, weight):
        raise checks.KernelArgumentError(
            f"product_in_parts: {sizes} is not for the kernel here; ask goes_in_parts first"
        )
    if tuning.thin_tiles(sizes["tokens"], sizes["columns"], sizes["inner"], x.dtype):
        from pallas_kernels.products.thin_kernel import thin_product_in_parts_kernel

        return thin_product_in_parts_kernel(x, weight)
    from pallas_kernels.products.kernel import product_in_parts_kernel

    return product_in_parts_kernel(x, weight)
