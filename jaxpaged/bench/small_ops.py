"""The small ops of a layer: checked against float32 references, and timed beside XLA's code.

Add and norm, gate, rotate and write KV. Rows of NaN stand where a batch has padding, and pools are
full of it: none may reach a row that counts.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bench.attention_check import verdict, worst
from jaxpaged.bench.attention_times import L2_BYTES
from jaxpaged.bench.kernel_times import kernel_times
from jaxpaged.bench.roofline import Ceilings
from pallas_kernels.fused_norm import add_rms_norm_reference
from pallas_kernels.fused_norm.kernel import add_rms_norm_kernel
from pallas_kernels.gated import gated_reference
from pallas_kernels.gated.kernel import gated_kernel
from pallas_kernels.rope_write import rotate_and_write_reference
from pallas_kernels.rope_write.kernel import rotate_and_write_kernel

OPS = ("norm", "gated", "rope")
EPS = 1e-5
RUNS = 5  # of the timed program
HOT_S = 0.3  # for which it runs before
TIMED_ROWS = (1, 64, 256, 8192)
# of the type's epsilon: one is right to the last bit, and heads that are normed are rounded twice
MAX_ERROR = 1.5
CHECKED_ROWS = 67
NORM_SHAPES = (
    *((width, "bfloat16") for width in (128, 640, 896, 1152, 2048, 3584, 4096, 5120, 5376, 8192)),
    *((width, "float16") for width in (128, 896, 4096, 8192)),
)
GATED_SHAPES = (
    *((ffn, "silu", "bfloat16") for ffn in (4864, 13824, 14336, 18944, 6912, 2048, 8)),
    *((ffn, "gelu_tanh", "bfloat16") for ffn in (4864, 14336, 6912, 8)),
    *((ffn, "silu", "float16") for ffn in (4864, 14336, 8)),
)
# kv_heads, group, head_dim, page_size, num_pages, has_norms, has_bias, dtype
ROPE_SHAPES = (
    (8, 4, 128, 16, 3000, False, False, "bfloat16"),
    (4, 7, 128, 16, 3000, False, False, "bfloat16"),
    (4, 7, 128, 16, 3000, False, True, "bfloat16"),
    (2, 7, 64, 32, 600, False, False, "bfloat16"),
    (2, 7, 64, 32, 600, False, True, "bfloat16"),
    (40, 1, 128, 16, 600, False, False, "bfloat16"),
    (1, 4, 256, 16, 600, True, False, "bfloat16"),
    (8, 4, 128, 64, 600, True, False, "bfloat16"),
    (8, 4, 128, 64, 600, True, True, "bfloat16"),
    (2, 3, 96, 128, 600, False, False, "bfloat16"),
    (8, 1, 128, 16, 140_000, False, False, "bfloat16"),  # more than 2^31 values
    (1, 16, 64, 16, 600, False, False, "bfloat16"),
    (8, 2, 96, 64, 600, False, False, "bfloat16"),
    (8, 4, 128, 16, 600, False, False, "float16"),
    (1, 4, 256, 16, 600, True, False, "float16"),
    (2, 7, 64, 32, 600, False, False, "float16"),
    (2, 7, 64, 32, 600, False, True, "float16"),
    (2, 3, 96, 128, 600, False, False, "float16"),
)


def check(op: str, cases: int) -> Iterator[dict[str, Any]]:
    """Errors of `cases` random cases a shape, in units of the type's epsilon."""
    one_case, shapes = {
        "norm": (_norm_error, NORM_SHAPES),
        "gated": (_gated_error, GATED_SHAPES),
        "rope": (_rope_error, ROPE_SHAPES),
    }[op]
    return check_shapes(op, one_case, shapes, cases)


def check_shapes(
    op: str, one_case: Callable[..., float], shapes: Sequence[tuple[Any, ...]], cases: int
) -> Iterator[dict[str, Any]]:
    """A verdict a shape, whose last entry is the type: `one_case(seed, *shape)` gives an error."""
    for shape in shapes:
        eps = float(jnp.finfo(shape[-1]).eps)
        errors = [one_case(seed, *shape) / eps for seed in range(cases)]
        yield verdict(op, str(shape), errors, MAX_ERROR)


def time_op(op: str, ceilings: Ceilings | None) -> list[dict[str, Any]]:
    """Microseconds on the device of a call in the shape of llama3-8b, and bytes moved a second."""
    kernel, plain, inputs_of, num_bytes = {
        "norm": (_norm, _norm_reference, _norm_inputs, lambda rows: 4 * rows * 4096 * 2),
        "gated": (_gated, _gated_reference, _gated_inputs, lambda rows: 3 * rows * 14336 * 2),
        "rope": (_rope, _rope_reference, _rope_inputs, lambda rows: 2 * rows * 48 * 128 * 2),
    }[op]
    lines = []
    for rows in TIMED_ROWS:
        copies = int(min(16, max(2, -(-4 * L2_BYTES // num_bytes(rows)))))
        inputs = [inputs_of(rows, copy) for copy in range(copies)]
        for name, function in (("kernel", kernel), ("xla", plain)):
            us, launches = device_cost(function, inputs)
            line: dict[str, Any] = {"op": op, "rows": rows, "by": name, "us": round(us, 2)}
            line |= {"launches": round(launches, 2), "TB/s": round(num_bytes(rows) / us / 1e6, 3)}
            if ceilings is not None:
                floor = 1e6 * num_bytes(rows) / ceilings.bytes_per_s
                line |= {"roofline_us": round(floor, 2), "of_roofline": round(floor / us, 3)}
            lines.append(line)
    return lines


def device_cost(function: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> tuple[float, float]:
    """Microseconds and launches a call, in one program that goes through `inputs`.

    It has run for a while by then: a GPU at its limit of power lowers its clock, as it does in use.
    """
    donated = tuple(range(3, 5)) if function in (_rope, _rope_reference) else ()

    def program(inputs, *pools):
        outs = []
        for one in inputs:
            if pools:  # each call writes into the pools of the call before
                q, *pools = function(*one[:3], *pools, one[3])
                outs.append(q)
            else:
                outs.append(function(*one))
        return outs, pools

    pools = [jnp.zeros((3000, 8, 16, 128), jnp.bfloat16) for _ in donated]
    jitted = jax.jit(program, donate_argnums=(1, 2) if donated else ())
    _, pools = jax.block_until_ready(jitted(inputs, *pools))

    def call() -> None:
        nonlocal pools
        for _ in range(RUNS):
            _, pools = jax.block_until_ready(jitted(inputs, *pools))

    start = time.monotonic()
    while time.monotonic() - start < HOT_S:
        call()
    times, calls = kernel_times(call), RUNS * len(inputs)
    us = sum(total for _, total in times.values()) / calls
    return us or float("nan"), sum(count for count, _ in times.values()) / calls


_norm = jax.jit(functools.partial(add_rms_norm_kernel, eps=EPS))
_norm_reference = jax.jit(functools.partial(add_rms_norm_reference, eps=EPS))
_gated_by = jax.jit(gated_kernel, static_argnames="activation")
_gated_reference_by = jax.jit(gated_reference, static_argnames="activation")
_gated = functools.partial(_gated_by, activation="silu")
_gated_reference = functools.partial(_gated_reference_by, activation="silu")
_rope_by = jax.jit(rotate_and_write_kernel, static_argnames="eps", donate_argnums=(3, 4))
_rope_reference_by = jax.jit(rotate_and_write_reference, static_argnames="eps")
_rope = functools.partial(_rope_by, norms=None, eps=EPS, bias=None)
_rope_reference = functools.partial(_rope_reference_by, norms=None, eps=EPS, bias=None)


def _normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def _norm_inputs(rows: int, copy: int) -> tuple[jax.Array, ...]:
    x, residual = (_normal(2 * copy + i, rows, 4096) for i in range(2))
    return x, residual, _normal(0, 4096, dtype=jnp.float32)


def _gated_inputs(rows: int, copy: int) -> tuple[jax.Array, ...]:
    return (_normal(copy, rows, 2 * 14336),)


def _rope_inputs(rows: int, copy: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(copy)
    angles = rng.uniform(0, 6, (rows, 64)).astype(np.float32)
    slots = 16 + rng.permutation(2999 * 16)[:rows]
    qkv = _normal(copy, rows, 8, 6, 128)
    return qkv, jnp.cos(angles), jnp.sin(angles), jnp.asarray(slots, jnp.int32)


def error(got: jax.Array, want: jax.Array, counts: np.ndarray) -> float:
    """Largest difference over the rows that count, relative to the values or their mean size."""
    ours, theirs = (np.asarray(x, np.float32)[counts] for x in (got, want))
    if not theirs.size:
        return 0.0
    size = np.maximum(np.abs(theirs), np.sqrt(np.mean(theirs**2)))
    return float(np.max(np.abs(ours - theirs) / size))


def random_padding(rng: np.random.Generator, rows: int) -> np.ndarray:
    """bool[rows]: a random number of rows, anywhere, that hold NaN."""
    return rng.permutation(rows) < rng.integers(0, rows)


def _norm_error(seed: int, embed: int, dtype: Any) -> float:
    padding = random_padding(np.random.default_rng(seed), CHECKED_ROWS)
    x = jnp.where(padding[:, None], jnp.nan, _normal(seed, CHECKED_ROWS, embed, dtype=dtype))
    residual = _normal(seed + 1, CHECKED_ROWS, embed, dtype=dtype, scale=9)
    scale = _normal(seed + 2, embed, dtype=jnp.float32)
    normed, total = _norm(x, residual, scale)
    if not np.array_equal(np.asarray(total), np.asarray(residual + x), equal_nan=True):
        return float("inf")
    wanted, _ = _norm_reference(
        jnp.zeros(total.shape, jnp.float32), total.astype(jnp.float32), scale
    )
    return error(normed, wanted, ~padding)


def _gated_error(seed: int, ffn: int, activation: str, dtype: Any) -> float:
    rows = 3 if seed % 2 else 300
    padding = random_padding(np.random.default_rng(seed), rows)
    both = jnp.where(padding[:, None], jnp.nan, _normal(seed, rows, 2 * ffn, dtype=dtype, scale=4))
    wanted = _gated_reference_by(both.astype(jnp.float32), activation=activation)
    return error(_gated_by(both, activation=activation), wanted, ~padding)


def _rope_error(seed: int, *shape: Any) -> float:
    kv_heads, group, head_dim, page_size, num_pages, has_norms, has_bias, dtype = shape
    rng, tokens = np.random.default_rng(seed), 1 if seed % 4 == 0 else 61
    places = num_pages * page_size
    slots = page_size + rng.permutation(places - page_size - 1)[:tokens]
    padding = random_padding(rng, tokens)
    slots[-1] = places - 1  # the pool's last place
    slots[padding] = np.where(rng.integers(0, 2, padding.sum()), 0, places)  # or past it
    angles = rng.uniform(0, 6, (tokens, head_dim // 2)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    qkv = _normal(seed, tokens, kv_heads, group + 2, head_dim, dtype=dtype)
    qkv = jnp.where(padding[:, None, None, None], jnp.nan, qkv)
    factors = [_normal(seed + i, head_dim, dtype=jnp.float32) for i in (5, 6)]
    options: dict[str, Any] = {"norms": tuple(factors) if has_norms else None, "eps": EPS}
    bias = _normal(seed + 7, kv_heads, group + 2, head_dim, dtype=dtype) if has_bias else None
    pools = [jnp.full((num_pages, kv_heads, page_size, head_dim), jnp.nan, dtype) for _ in "kv"]
    q, *pools = _rope_by(qkv, cos, sin, *pools, jnp.asarray(slots, jnp.int32), **options, bias=bias)
    one_page = jnp.zeros((tokens, kv_heads, 1, head_dim), jnp.float32)  # a page of one a token
    wanted_q, *wanted = _rope_reference_by(
        qkv.astype(jnp.float32),
        cos,
        sin,
        one_page,
        one_page,
        jnp.arange(tokens, dtype=jnp.int32),
        **options,
        bias=None if bias is None else bias.astype(jnp.float32),
    )
    written = np.flatnonzero(~padding)
    page, offset = slots[written] // page_size, slots[written] % page_size
    errors = [error(q, wanted_q, ~padding)]
    for pool, rows in zip(pools, wanted, strict=True):
        every = np.ones(len(written), bool)
        errors.append(error(pool[page, :, offset], rows[written, :, 0], every))
        heads_written = int(jnp.sum(~jnp.isnan(pool[1:]).all(axis=-1)))  # the null page may be
        if heads_written != len(written) * kv_heads:
            errors.append(float("inf"))
    return worst(errors)
