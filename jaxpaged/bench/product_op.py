"""Products with kernels of their own: checked against float32, and timed beside the library's.

The gated product beside a product and the activation; the product in parts, which the norm adds up,
beside a product and the norm. Rows of NaN stand where a batch has padding: none may reach a row
that counts.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bench.attention_check import worst
from jaxpaged.bench.roofline import Ceilings
from jaxpaged.bench.small_ops import EPS, check_shapes, device_cost, error, random_padding
from jaxpaged.layers.linear import contract_last
from pallas_kernels.fused_norm import add_rms_norm_reference
from pallas_kernels.fused_norm.kernel import add_rms_norm_kernel
from pallas_kernels.gated import gated_reference
from pallas_kernels.gated.kernel import gated_kernel
from pallas_kernels.products import product_in_parts
from pallas_kernels.products.kernel import gated_product_kernel

GATED, PARTS = OPS = ("gated-product", "product-in-parts")
# tokens, ffn, embed, activation, dtype
SHAPES = (
    (128, 18944, 3584, "silu", "bfloat16"),
    (224, 13824, 5120, "silu", "bfloat16"),
    (256, 14336, 4096, "silu", "bfloat16"),
    (512, 14336, 4096, "silu", "bfloat16"),
    (1160, 18944, 3584, "silu", "bfloat16"),
    (2048, 13824, 5120, "silu", "bfloat16"),
    (2304, 4864, 896, "silu", "bfloat16"),
    (712, 6912, 1152, "gelu_tanh", "bfloat16"),
    (8192, 1024, 256, "silu", "float16"),
    (520, 64, 64, "gelu_tanh", "float16"),
)
# tokens, columns, inner, dtype
PARTS_SHAPES = (
    (256, 4096, 14336, "bfloat16"),
    (224, 5120, 13824, "bfloat16"),
    (256, 3584, 18944, "bfloat16"),
    (208, 8192, 9280, "float16"),
    (64, 4096, 4096, "bfloat16"),
    (64, 4096, 14336, "bfloat16"),
    (40, 5120, 13824, "bfloat16"),
    (48, 896, 4864, "float16"),
)
TIMED_PARTS = PARTS_SHAPES[0], *PARTS_SHAPES[4:6]
TIMED_TOKENS, TIMED_FFN, TIMED_EMBED = (128, 256, 512, 1024, 8192), 14336, 4096
COPIES = 3  # of the weights, of 235 MB each


def check(op: str, cases: int) -> Iterator[dict[str, Any]]:
    """Errors of `cases` random cases a shape, in units of the type's epsilon."""
    if op == PARTS:
        return check_shapes(op, _error_of_parts, PARTS_SHAPES, cases)
    return check_shapes(op, _error_of, SHAPES, cases)


def time_op(op: str, ceilings: Ceilings | None) -> list[dict[str, Any]]:
    """Microseconds on the device of a call in the shape of llama3-8b, and operations a second."""
    lines = []
    for rows, flops, inputs, ways in _timed_parts() if op == PARTS else _timed_gated():
        for name, function in zip(("kernel", "library"), ways, strict=True):
            us, _ = device_cost(function, inputs)
            line: dict[str, Any] = {"op": op, "rows": rows, "by": name, "us": round(us, 2)}
            line["TFLOP/s"] = round(flops / us / 1e6, 1)
            if ceilings is not None:
                line["of_roofline"] = round(1e6 * flops / us / ceilings.flops_per_s, 3)
            lines.append(line)
    return lines


type Timed = tuple[int, int, list[tuple[Any, ...]], list[Callable[..., Any]]]
"""Rows, operations, arguments of several calls, and the kernel's and the library's way."""


def _timed_gated() -> Iterator[Timed]:
    ways: list[Callable[..., Any]] = [
        functools.partial(way, activation="silu") for way in (_kernel, _two_kernels)
    ]
    for tokens in TIMED_TOKENS:
        x, weight = _inputs(0, tokens, TIMED_FFN, TIMED_EMBED, "bfloat16")
        inputs = [(x + i, jnp.roll(weight, 8 * i, 1)) for i in range(COPIES)]
        yield tokens, 4 * tokens * TIMED_FFN * TIMED_EMBED, inputs, ways


def _timed_parts() -> Iterator[Timed]:
    for shape in TIMED_PARTS:
        tokens, columns, inner, _ = shape
        inputs = [_parts_inputs(i, *shape) for i in range(COPIES)]
        yield tokens, 2 * tokens * columns * inner, inputs, [_parts_then_norm, _library_then_norm]


_kernel = jax.jit(gated_product_kernel, static_argnames="activation")


@functools.partial(jax.jit, static_argnames="activation")
def _two_kernels(x: jax.Array, weight: jax.Array, *, activation: str) -> jax.Array:
    both = contract_last(x, weight.reshape(-1, x.shape[1]), x.dtype)
    return gated_kernel(both, activation=activation)


# XLA's search among its Triton products would take most of the check's time
@functools.partial(
    jax.jit,
    static_argnames="activation",
    compiler_options={"xla_gpu_enable_triton_gemm": False},
)
def _reference(x: jax.Array, weight: jax.Array, *, activation: str) -> jax.Array:
    wide, rows = x.astype(jnp.float32), weight.reshape(-1, x.shape[1]).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        both = contract_last(wide, rows, jnp.float32)
    return gated_reference(both, activation=activation)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _inputs(seed: int, tokens: int, ffn: int, embed: int, dtype: str) -> tuple[Any, Any]:
    a, b = jax.random.split(jax.random.key(seed))
    weight = jax.random.normal(b, (2, ffn, embed), jnp.float32) * (2.0 / embed**0.5)
    return jax.random.normal(a, (tokens, embed), jnp.float32).astype(dtype), weight.astype(dtype)


def _error_of(seed: int, tokens: int, ffn: int, embed: int, activation: str, dtype: str) -> float:
    x, weight = _inputs(seed, tokens, ffn, embed, dtype)
    padding = random_padding(np.random.default_rng(seed), tokens)
    x = jnp.where(padding[:, None], jnp.nan, x)
    got = _kernel(x, weight, activation=activation)
    return error(got, _reference(x, weight, activation=activation), ~padding)


@jax.jit
def _parts_then_norm(x: jax.Array, weight: jax.Array, residual: jax.Array, scale: jax.Array) -> Any:
    return add_rms_norm_kernel(product_in_parts(x, weight), residual, scale, eps=EPS)


@jax.jit
def _library_then_norm(
    x: jax.Array, weight: jax.Array, residual: jax.Array, scale: jax.Array
) -> Any:
    added = contract_last(x, weight, x.dtype)
    return add_rms_norm_kernel(added, residual, scale, eps=EPS)


@functools.partial(jax.jit, compiler_options={"xla_gpu_enable_triton_gemm": False})
def _exact_sum(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        added = contract_last(x.astype(jnp.float32), weight.astype(jnp.float32), jnp.float32)
    return added + residual.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _parts_inputs(seed: int, tokens: int, columns: int, inner: int, dtype: str) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (tokens, inner), jnp.float32)
    weight = jax.random.normal(keys[1], (columns, inner), jnp.float32) / inner**0.5
    residual = 8 * jax.random.normal(keys[2], (tokens, columns), jnp.float32)
    scale = jax.random.normal(keys[3], (columns,), jnp.float32)
    return x.astype(dtype), weight.astype(dtype), residual.astype(dtype), scale


def _error_of_parts(seed: int, tokens: int, columns: int, inner: int, dtype: str) -> float:
    x, weight, residual, scale = _parts_inputs(seed, tokens, columns, inner, dtype)
    padding = random_padding(np.random.default_rng(seed), tokens)
    x = jnp.where(padding[:, None], jnp.nan, x)
    normed, total = _parts_then_norm(x, weight, residual, scale)
    wide = total.astype(jnp.float32)
    wanted, _ = add_rms_norm_reference(jnp.zeros_like(wide), wide, scale, eps=EPS)
    exact = _exact_sum(x, weight, residual)
    return worst([error(total, exact, ~padding), error(normed, wanted, ~padding)])
