"""The gated product: checked against a float32 reference, and timed beside two kernels in a row.

Rows of NaN stand where a batch has padding: none may reach a row that counts.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bench.roofline import Ceilings
from jaxpaged.bench.small_ops import check_shapes, device_cost, error, random_padding
from jaxpaged.layers.linear import contract_last
from pallas_kernels.gated import gated_reference
from pallas_kernels.gated.kernel import gated_kernel
from pallas_kernels.gated.product_kernel import gated_product_kernel

OP = "gated-product"
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
TIMED_TOKENS, TIMED_FFN, TIMED_EMBED = (128, 256, 512, 1024, 8192), 14336, 4096
COPIES = 3  # of the weights, of 235 MB each


def check(cases: int) -> Iterator[dict[str, Any]]:
    """Errors of `cases` random cases a shape, in units of the type's epsilon."""
    return check_shapes(OP, _error_of, SHAPES, cases)


def time_op(ceilings: Ceilings | None) -> list[dict[str, Any]]:
    """Microseconds on the device of a call in the shape of llama3-8b, and operations a second."""
    lines = []
    for tokens in TIMED_TOKENS:
        x, weight = _inputs(0, tokens, TIMED_FFN, TIMED_EMBED, "bfloat16")
        inputs = [(x + i, jnp.roll(weight, 8 * i, 1)) for i in range(COPIES)]
        flops = 4 * tokens * TIMED_FFN * TIMED_EMBED
        for name, function in (("kernel", _kernel), ("two", _two_kernels)):
            us, _ = device_cost(functools.partial(function, activation="silu"), inputs)
            line: dict[str, Any] = {"op": OP, "rows": tokens, "by": name, "us": round(us, 2)}
            line["TFLOP/s"] = round(flops / us / 1e6, 1)
            if ceilings is not None:
                line["of_roofline"] = round(1e6 * flops / us / ceilings.flops_per_s, 3)
            lines.append(line)
    return lines


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
