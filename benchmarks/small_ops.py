"""Check the ops of one pass on a Hopper GPU against float32 references, and time them against XLA.

    python -m benchmarks.small_ops [--check norm|gated|rope] [--time] [--out FILE]

`--check` compares add_rms_norm, gated or rotate_and_write with its reference in float32, over pools
of NaN. `--time` profiles each op of the llama3-8b shape: device microseconds and kernel launches a
call, beside those of the reference that XLA compiles.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.bench.kernel_times import kernel_times
from pallas_kernels.fused_norm import add_rms_norm_reference
from pallas_kernels.fused_norm.kernel import add_rms_norm_kernel
from pallas_kernels.gated import gated_reference
from pallas_kernels.gated.kernel import gated_kernel
from pallas_kernels.rope_write import rotate_and_write_reference
from pallas_kernels.rope_write.kernel import rotate_and_write_kernel

EPS = 1e-5
CALLS = 40  # profiled; one a program, since XLA would merge calls that follow each other
ROWS = (1, 64, 256, 8192)
NORM_WIDTHS = (128, 640, 896, 1152, 2048, 3584, 4096, 5120, 5376, 8192)
GATED_WIDTHS = (4864, 13824, 14336, 18944, 6912, 2048, 8)
# kv_heads, group, head_dim, page_size, num_pages, normed
ROPE_SHAPES = (
    (8, 4, 128, 16, 3000, False),
    (4, 7, 128, 16, 3000, False),
    (2, 7, 64, 32, 600, False),
    (40, 1, 128, 16, 600, False),
    (1, 4, 256, 16, 600, True),
    (8, 4, 128, 64, 600, True),
    (2, 3, 96, 128, 600, False),
    (8, 1, 128, 16, 140_000, False),  # more than 2^31 values
)


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def error(got: jax.Array, want: jax.Array) -> float:
    """Largest difference, relative to the values and at least to their root mean square."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    size = np.maximum(np.abs(want), np.sqrt(np.mean(want**2)))
    return float(np.max(np.abs(got - want) / size))


def check_norm(rows: int, embed: int, dtype: Any) -> float:
    x, residual = normal(0, rows, embed, dtype=dtype), normal(1, rows, embed, dtype=dtype, scale=9)
    scale = normal(2, embed, dtype=jnp.float32)
    normed, total = jax.jit(partial(add_rms_norm_kernel, eps=EPS))(x, residual, scale)
    if not np.array_equal(np.asarray(total), np.asarray(residual + x)):
        return float("inf")
    zero = jnp.zeros(total.shape, jnp.float32)
    reference = jax.jit(partial(add_rms_norm_reference, eps=EPS))
    wanted, _ = reference(zero, total.astype(jnp.float32), scale)
    return error(normed, wanted)


def check_gated(rows: int, ffn: int, activation: str, dtype: Any) -> float:
    both = normal(3, rows, 2 * ffn, dtype=dtype, scale=4)
    got = jax.jit(partial(gated_kernel, activation=activation))(both)
    wanted = jax.jit(partial(gated_reference, activation=activation))(both.astype(jnp.float32))
    return error(got, wanted)


def rope_case(tokens: int, shape: tuple[Any, ...], dtype: Any, *, poison: float) -> list[jax.Array]:
    kv_heads, group, head_dim, page_size, num_pages, _ = shape
    rng = np.random.default_rng(0)
    slots = page_size + rng.permutation((num_pages - 1) * page_size)[:tokens]
    slots[-1] = num_pages * page_size - 1  # the pool's last place
    if tokens > 4:
        slots[1:3] = 0  # padding
        slots[3] = num_pages * page_size  # past the pool
    angles = rng.uniform(0, 6, (tokens, head_dim // 2)).astype(np.float32)
    pool = (num_pages, kv_heads, page_size, head_dim)
    return [
        normal(4, tokens, kv_heads, group + 2, head_dim, dtype=dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.full(pool, poison, dtype),
        jnp.full(pool, poison, dtype),
        jnp.asarray(slots, jnp.int32),
    ]


def check_rope(tokens: int, shape: tuple[Any, ...], dtype: Any) -> float:
    kv_heads, _, head_dim, page_size, num_pages, normed = shape
    case = rope_case(tokens, shape, dtype, poison=float("nan"))
    qkv, cos, sin, _, _, slots = case
    norms = (normal(5, head_dim, dtype=jnp.float32), normal(6, head_dim, dtype=jnp.float32))
    chosen = norms if normed else None
    run = jax.jit(rotate_and_write_kernel, static_argnames="eps", donate_argnums=(3, 4))
    q, k_pages, v_pages = run(*case, norms=chosen, eps=EPS)
    row_pages = jnp.zeros((tokens, kv_heads, 1, head_dim), jnp.float32)  # a page of one a token
    wanted_q, wanted_k, wanted_v = jax.jit(rotate_and_write_reference, static_argnames="eps")(
        qkv.astype(jnp.float32),
        cos,
        sin,
        row_pages,
        row_pages,
        jnp.arange(tokens, dtype=jnp.int32),
        norms=chosen,
        eps=EPS,
    )
    written = np.flatnonzero((np.asarray(slots) > 0) & (np.asarray(slots) < num_pages * page_size))
    page, offset = slots[written] // page_size, slots[written] % page_size
    errors = [error(q, wanted_q)]
    for pages, wanted in ((k_pages, wanted_k), (v_pages, wanted_v)):
        errors.append(error(pages[page, :, offset], wanted[written, :, 0]))
        heads_written = jnp.sum(~jnp.isnan(pages[1:]).all(axis=-1))  # the null page may be
        if int(heads_written) != len(written) * kv_heads:
            errors.append(float("inf"))
    return max(errors)


def checks(op: str) -> dict[str, float]:
    """Errors by case in units of the type's epsilon: results must be right to their last bit."""
    found = {}
    for dtype in (jnp.bfloat16, jnp.float16):
        few = 100 if dtype == jnp.bfloat16 else 2  # the types differ in the conversions alone
        eps, name = float(jnp.finfo(dtype).eps), jnp.dtype(dtype).name
        if op == "norm":
            for embed in NORM_WIDTHS[-few:]:
                found[f"norm {name} 67 {embed}"] = check_norm(67, embed, dtype) / eps
        elif op == "gated":
            for ffn in GATED_WIDTHS[:few]:
                for rows, activation in ((3, "gelu_tanh"), (300, "silu")):
                    case = f"gated {name} {rows} {ffn} {activation}"
                    found[case] = check_gated(rows, ffn, activation, dtype) / eps
        else:
            for number, shape in enumerate(ROPE_SHAPES[:few]):
                tokens = (1, 61)[number % 3 > 0]
                found[f"rope {name} {tokens} {shape}"] = check_rope(tokens, shape, dtype) / eps
    return found


def rotate_as_one(qkv, cos, sin, k_pages, v_pages, slots, *, norms, eps):
    """The reference with all heads turned in one expression: what XLA makes of simpler code."""
    del norms, eps
    tokens, kv_heads, blocks, head_dim = qkv.shape
    wide = qkv.astype(jnp.float32).reshape(tokens, kv_heads, blocks, 2, head_dim // 2)
    swapped = jnp.stack([-wide[:, :, :, 1], wide[:, :, :, 0]], axis=3)
    cos, sin = (table[:, None, None, None, :] for table in (cos, sin))
    is_value = (jnp.arange(blocks) == blocks - 1)[None, None, :, None, None]
    turned = jnp.where(is_value, wide, wide * cos + swapped * sin).astype(qkv.dtype)
    turned = lax.optimization_barrier(turned.reshape(qkv.shape))
    page, offset = slots // k_pages.shape[2], slots % k_pages.shape[2]
    q = turned[:, :, : blocks - 2].reshape(tokens, -1, head_dim)
    k_pages = k_pages.at[page, :, offset].set(turned[:, :, blocks - 2], mode="drop")
    return q, k_pages, v_pages.at[page, :, offset].set(turned[:, :, blocks - 1], mode="drop")


def device_cost(function: Callable[..., Any], *arguments: jax.Array, donate=()) -> dict[str, Any]:
    """Microseconds on the device and launches of a call, and microseconds by kernel."""
    jitted = jax.jit(function, donate_argnums=donate)
    kept = list(arguments)

    def call():
        out = jax.block_until_ready(jitted(*kept))
        for place in donate:  # the pools come last among the results, in order
            kept[place] = out[place - min(donate) + 1]

    call()
    call()
    times = kernel_times(lambda: [call() for _ in range(CALLS)])
    return {
        "us": round(sum(total for _, total in times.values()) / CALLS, 2),
        "launches": round(sum(count for count, _ in times.values()) / CALLS, 2),
        "kernels": {name[:60]: round(us / count, 2) for name, (count, us) in times.items()},
    }


def timings() -> dict[str, dict[str, Any]]:
    found = {}
    for rows in ROWS:
        norm = normal(0, rows, 4096), normal(1, rows, 4096), normal(2, 4096, dtype=jnp.float32)
        both = normal(3, rows, 2 * 14336)
        for name, op in (("kernel", add_rms_norm_kernel), ("xla", add_rms_norm_reference)):
            found[f"norm {rows} {name}"] = device_cost(partial(op, eps=EPS), *norm)
        for name, op in (("kernel", gated_kernel), ("xla", gated_reference)):
            found[f"gated {rows} {name}"] = device_cost(partial(op, activation="silu"), both)
        for name, op in (
            ("kernel", rotate_and_write_kernel),
            ("xla", rotate_and_write_reference),
            ("xla as one", rotate_as_one),
        ):
            case = rope_case(rows, (8, 4, 128, 16, 3000, False), jnp.bfloat16, poison=0.0)
            found[f"rope {rows} {name}"] = device_cost(
                partial(op, norms=None, eps=EPS), *case, donate=(3, 4)
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", choices=("norm", "gated", "rope"), default=None)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="write a JSON report here")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python -m benchmarks.small_ops " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    wrong: list[str] = []
    if args.check:
        found = checks(args.check)
        wrong = [case for case, units in found.items() if not units <= 1.0]
        report["worst error in units of the type's epsilon"] = max(found.values())
        print(f"{len(found)} cases, worst error {max(found.values()):.3f} eps")
        for case in wrong:
            print("WRONG", case, found[case])
    if args.time:
        report["timings"] = timings()
        for case, cost in report["timings"].items():
            print(case, cost["us"], "us", cost["launches"], "launches", cost["kernels"])
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
