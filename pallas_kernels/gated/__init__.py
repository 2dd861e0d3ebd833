"""The product of an activated gate and its partner; `products` makes both as well."""

from jaxtyping import Array, Float

from pallas_kernels import checks, tuning
from pallas_kernels.gated.reference import gated_reference

__all__ = ["gated", "gated_reference"]

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
    if tuning.is_on_hopper():
        from pallas_kernels.gated import kernel

        if kernel.supports(sizes["both"] // 2, activation, both.dtype):
            return kernel.gated_kernel(both, activation=activation)
    return gated_reference(both, activation=activation)
