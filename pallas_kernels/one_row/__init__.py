"""One row's way from attention to the next layer's queries, in one launch."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks, tuning
from pallas_kernels.one_row.reference import BlockWeights, one_row_reference

__all__ = ["BlockWeights", "goes_alone", "new_counters", "one_row_block", "one_row_reference"]

_OP = "one_row_block"


def goes_alone(weights: BlockWeights, *, activation: str) -> bool:
    """Whether `one_row_block` takes these here; else products, norms and `gated` are the way."""
    return (
        tuning.is_on_hopper()
        and tuning.runs_together()
        and activation in ("silu", "gelu_tanh")
        and len(weights.down) <= tuning.ONE_ROW_WIDTH
        and all(tuning.supports_one_row(len(w), w.shape[1], w.dtype) for w in weights.products)
        and len({w.dtype for w in weights.products}) == 1
    )


def new_counters() -> Int32[Array, " counters"]:
    """What `one_row_block` counts on, zeros: for the first call, which gives them to the next."""
    return jnp.zeros(tuning.ONE_ROW_COUNTERS, jnp.int32)


def one_row_block(
    seen: Float[Array, "1 heads"],
    residual: Float[Array, "1 embed"],
    weights: BlockWeights,
    counters: Int32[Array, " counters"],
    *,
    activation: str,
    eps: float,
) -> tuple[
    Float[Array, "1 embed"],
    Float[Array, "1 columns"] | Float[Array, "parts 1 embed"],
    Int32[Array, " counters"],
]:
    """Project what a row has seen, add, norm, feed forward, add, norm, and project to qkv.

    Args:
        seen: what the row's heads gave, end to end.
        weights: for what `goes_alone` allows; without the last two nothing follows `down`.
        counters: zeros, from `new_counters` or the call before: two calls at the same time would
            each hold multiprocessors that the other waits for.
        activation: "silu" or "gelu_tanh".
        eps: of both norms.

    Returns:
        (the new residual, the next layer's qkv without bias, counters), in the type of `seen`. Or
        the residual before `down`, and float32 parts for `add_rms_norm` to add to it.

    Raises:
        KernelArgumentError: shapes or types that do not fit; while tracing.

    Cost: every weight is read once, at the memory's speed; on a Hopper GPU of which all 132
    multiprocessors are free, since they wait for each other.
    """
    expected = {
        "seen": (seen, ("one", "heads")),
        "residual": (residual, ("one", "embed")),
        "out": (weights.out, ("embed", "heads")),
        "feed_forward_scale": (weights.feed_forward_scale, ("embed",)),
        "gate_up": (weights.gate_up, ("two", "ffn", "embed")),
        "down": (weights.down, ("embed", "ffn")),
    }
    if weights.qkv is not None and weights.attention_scale is not None:
        expected["qkv"] = weights.qkv, ("columns", "embed")
        expected["attention_scale"] = weights.attention_scale, ("embed",)
    sizes = checks.check_shapes(_OP, expected)
    for name, (array, _) in expected.items():
        is_scale = name.endswith("scale")
        checks.check_dtype(_OP, name, array, (jnp.float32,) if is_scale else (seen.dtype,))
    if sizes["one"] != 1 or sizes["two"] != 2 or not goes_alone(weights, activation=activation):
        raise checks.KernelArgumentError(
            f"{_OP}: {sizes} with {activation!r} is not for the kernel here; ask goes_alone first"
        )
    from pallas_kernels.one_row.kernel import one_row_kernel

    return one_row_kernel(seen, residual, weights, counters, activation=activation, eps=eps)
