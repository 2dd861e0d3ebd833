"""A row's way through a layer: checked against float32 sums, and timed beside the library's."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bench.attention_check import verdict
from jaxpaged.bench.roofline import Ceilings
from jaxpaged.bench.small_ops import EPS, device_cost
from jaxpaged.layers.linear import contract_last
from pallas_kernels.fused_norm import add_rms_norm
from pallas_kernels.gated import gated
from pallas_kernels.one_row import BlockWeights, new_counters, one_row_block, one_row_reference

OPS = ("one-row",)
MAX_ERROR = 1e-2  # of a row: the length of the difference to the length of what it should be
# heads, embed, ffn, columns of qkv or 0 for the last layer, activation, dtype
SHAPES = (
    (4096, 4096, 14336, 6144, "silu", "bfloat16"),
    (4096, 4096, 14336, 0, "silu", "bfloat16"),
    (3584, 3584, 18944, 4608, "silu", "bfloat16"),
    (5120, 5120, 13824, 15360, "silu", "bfloat16"),
    (2048, 1152, 6912, 1536, "gelu_tanh", "bfloat16"),
    (896, 896, 4864, 1152, "silu", "float16"),
    (4096, 2560, 9728, 0, "silu", "float16"),
)
TIMED = SHAPES[0], *SHAPES[2:4]
COPIES = 3  # of the weights, of more than 400 MB each


def check(op: str, cases: int) -> Iterator[dict[str, Any]]:
    """Errors of twice as many random cases a shape."""
    for shape in SHAPES:
        yield verdict(
            op, str(shape), [_error(seed, *shape) for seed in range(2 * cases)], MAX_ERROR
        )


def time_op(op: str, ceilings: Ceilings | None) -> list[dict[str, Any]]:
    """Microseconds on the device from attention to the next layer's queries, and bytes a second."""
    lines = []
    for shape in TIMED:
        layers = [_inputs(copy, *shape) for copy in range(COPIES)]
        num_bytes = sum(w.size * w.dtype.itemsize for w in layers[0][2].products)
        ways: list[tuple[str, Callable[..., Any]]] = [("kernel", _kernel), ("library", _library)]
        for name, way in ways:
            chain = functools.partial(_chain, functools.partial(way, activation=shape[4]))
            us, launches = (cost / COPIES for cost in device_cost(chain, [(layers,)]))
            line: dict[str, Any] = {"op": op, "embed": shape[1], "by": name, "us": round(us, 2)}
            line |= {"launches": round(launches, 2), "TB/s": round(num_bytes / us / 1e6, 3)}
            if ceilings is not None:
                floor = 1e6 * num_bytes / ceilings.bytes_per_s
                line |= {"roofline_us": round(floor, 2), "of_roofline": round(floor / us, 3)}
            lines.append(line)
    return lines


def _chain(way: Callable[..., Any], layers: list[Any]) -> Any:
    """One after the other, as in a step: at the same time they would wait for each other."""
    seen, residual, _ = layers[0]
    counters = new_counters()
    for _, _, weights in layers:
        residual, qkv, counters = way(seen, residual, weights, counters)
        seen = qkv[:, : seen.shape[1]]
    return residual, seen


@functools.partial(jax.jit, static_argnames="activation")
def _kernel(
    seen: Any, residual: Any, weights: BlockWeights, counters: Any, *, activation: str
) -> Any:
    return one_row_block(seen, residual, weights, counters, activation=activation, eps=EPS)


@functools.partial(jax.jit, static_argnames="activation")
def _library(
    seen: Any, residual: Any, weights: BlockWeights, counters: Any, *, activation: str
) -> Any:
    out, gate_up, down, qkv = weights.products
    scale, next_scale = weights.feed_forward_scale, weights.attention_scale
    assert next_scale is not None
    added = contract_last(seen, out, seen.dtype)
    normed, residual = add_rms_norm(added, residual, scale, eps=EPS)
    inner = gated(contract_last(normed, gate_up, seen.dtype), activation=activation)
    added = contract_last(inner, down, seen.dtype)
    normed, residual = add_rms_norm(added, residual, next_scale, eps=EPS)
    return residual, contract_last(normed, qkv, seen.dtype), counters


@functools.partial(
    jax.jit,
    static_argnames="activation",
    compiler_options={"xla_gpu_enable_triton_gemm": False},
)
def _reference(seen: Any, residual: Any, weights: BlockWeights, *, activation: str) -> Any:
    with jax.default_matmul_precision("highest"):
        return one_row_reference(seen, residual, weights, activation=activation, eps=EPS)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _inputs(
    seed: int, heads: int, embed: int, ffn: int, columns: int, activation: str, dtype: str
) -> tuple[jax.Array, jax.Array, BlockWeights]:
    del activation
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    def factors():
        return 1 + 0.1 * jax.random.normal(next(keys), (embed,), jnp.float32)

    seen, residual = normal(1, heads), normal(1, embed, scale=3.0)
    out, scale = normal(embed, heads, scale=heads**-0.5), factors()
    gate_up = normal(2, ffn, embed, scale=2 * embed**-0.5)
    weights = BlockWeights(out, scale, gate_up, normal(embed, ffn, scale=ffn**-0.5))
    if columns:
        qkv = normal(columns, embed, scale=embed**-0.5)
        weights = weights._replace(attention_scale=factors(), qkv=qkv)
    return seen, residual, weights


def _error(seed: int, *shape: Any) -> float:
    """Infinite if a second run gives other bits, or leaves a counter that is no zero."""
    activation = shape[4]
    inputs = _inputs(seed, *shape)
    first, again = (
        jax.device_get(_kernel(*inputs, new_counters(), activation=activation)) for _ in range(2)
    )
    if any(not np.array_equal(a, b) for a, b in zip(first, again, strict=True)) or first[2].any():
        return float("inf")
    wanted = jax.device_get(_reference(*inputs, activation=activation))
    got = first[0], first[1].sum(0, keepdims=True) if first[1].ndim == 3 else first[1]
    return max(_distance(*pair) for pair in zip(got, wanted, strict=True))


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    ours, theirs = got.astype(np.float32), want.astype(np.float32)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
