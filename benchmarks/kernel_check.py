"""Check the attention kernels on a GPU against the float32 reference, and time them.

    python -m benchmarks.kernel_check [--check 16] [--time] [--kernels decode mixed] [--out FILE]

`--check N` draws N random ragged cases for each of the shapes below, NaN in every place that must
not be read, and fails if the relative error of any is 1e-2 or more. `--time` times the cases of
`TIMED`: one jitted program calls the op many times over KV larger than the L2 cache, so neither
dispatch nor the plan of the work, made once a step, counts.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.ragged_attention.decode_kernel import decode_attention
from pallas_kernels.ragged_attention.prefill_kernel import mixed_attention
from pallas_kernels.spec import AttentionSpec

MAX_ERROR = 1e-2
MAX_CHUNK = 200  # query tokens a row of a random case
L2_BYTES = 60e6
RAGGED = tuple(int(n) for n in np.random.RandomState(0).randint(32, 2048, 256))

type Arrays = tuple[jax.Array | None, ...]


@dataclass(frozen=True)
class Timed:
    """A case of bf16 with head_dim 128, and the time of FlashAttention 3 as vLLM 0.26 has it."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int
    kv_heads: int
    peer_us: float


TIMED = {
    "d256x1024_32_8": Timed([1] * 256, [1024] * 256, 32, 8, 273.0),
    "d32x4096_32_8": Timed([1] * 32, [4096] * 32, 32, 8, 130.9),
    "d64x1024_40_40": Timed([1] * 64, [1024] * 64, 40, 40, 324.9),
    "d256x1024_28_4": Timed([1] * 256, [1024] * 256, 28, 4, 148.1),
    "d256_ragged": Timed([1] * 256, RAGGED, 32, 8, 265.3),
    "d1x8192": Timed([1], [8192], 32, 8, 17.3),
    "d1x32768": Timed([1], [32768], 32, 8, 44.4),
    "p8192": Timed([8192], [8192], 32, 8, 858.6),
    "p2x8192": Timed([8192] * 2, [8192] * 2, 32, 8, 1870.3),
    "chunk2048on8192": Timed([2048], [8192], 32, 8, 409.5),
    "mixed": Timed([512] * 4 + [1] * 128, [2048] * 132, 32, 8, 394.8),
    "mixed_chunks": Timed([512] * 4, [2048] * 4, 32, 8, 125.6),
    "mixed_decodes": Timed([1] * 128, [2048] * 128, 32, 8, 259.9),
}


@dataclass(frozen=True)
class Shape:
    """What random cases share."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    max_kv_len: int = 700
    seqs: int = 12

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.window, self.soft_cap)


SHAPES = (
    Shape(32, 8, 128, 16),
    Shape(32, 8, 128, 64, seqs=3, max_kv_len=9000),
    Shape(28, 4, 128, 16),
    Shape(14, 2, 64, 32, dtype="float16"),
    Shape(5, 5, 128, 128),
    Shape(16, 1, 128, 16, max_kv_len=3000),
    Shape(8, 8, 96, 16),
    Shape(8, 2, 96, 64, has_sinks=True),
    Shape(16, 8, 256, 16),
    Shape(8, 4, 256, 64, window=300, soft_cap=30.0),
    Shape(64, 8, 64, 16, window=128, has_sinks=True),
    Shape(32, 8, 128, 32, soft_cap=20.0, dtype="float16"),
    Shape(32, 8, 128, 16, window=4000, max_kv_len=9000, seqs=4),
    Shape(1, 1, 64, 16, has_sinks=True, seqs=1, max_kv_len=5000),
)


@dataclass(frozen=True)
class Lengths:
    """The host's side of a random case: lengths, and pages in shuffled order."""

    q_lens: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    table: np.ndarray  # nonsense past each row's last page
    visible: np.ndarray  # bool[pages, page_size]: what some query sees

    @property
    def clean_table(self) -> np.ndarray:
        return np.where(self.table < len(self.visible), self.table, 0)


def random_lengths(shape: Shape, rng: np.random.Generator, *, decode: bool) -> Lengths:
    s = shape
    kv_lens = rng.integers(1, s.max_kv_len, s.seqs)
    rounded = np.maximum(kv_lens // 64 * 64, 1)  # some rows end with a page or a tile
    kv_lens = np.where(rng.integers(0, 4, s.seqs) == 0, rounded, kv_lens)
    chunks = np.minimum(kv_lens, rng.integers(1, MAX_CHUNK, s.seqs))
    q_lens = np.where(rng.integers(0, 3, s.seqs) == 0, 1, chunks)
    if decode:
        q_lens[:] = 1
    if s.seqs > 2:  # a row of padding: anywhere in a decode batch, else with no tokens
        padding = rng.integers(0, s.seqs)
        kv_lens[padding] = 0
        q_lens[padding] = int(decode)
    pages_per_seq = -(-s.max_kv_len // s.page_size) + 2
    pages = s.seqs * pages_per_seq + 1
    order, taken = rng.permutation(np.arange(1, pages)), 0
    table = rng.integers(pages, 2**31 - 1, (s.seqs, pages_per_seq), dtype=np.int32)
    visible = np.zeros((pages, s.page_size), bool)
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        count = -(-kv_len // s.page_size)
        ids = order[taken : taken + count]
        table[row, :count] = ids
        places = np.arange(count * s.page_size).reshape(count, s.page_size)
        first = 0 if s.window is None else kv_len - q_len + 1 - s.window
        visible[ids] = (places < kv_len) & (places >= first)
        taken += count
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
    return Lengths(q_lens, kv_lens, cu_q_lens, table, visible)


def random_case(shape: Shape, seed: int, *, decode: bool) -> tuple[Lengths, Arrays]:
    """Lengths, and the op's arguments: ragged rows, shuffled pages, NaN wherever none may look."""
    lengths = random_lengths(shape, np.random.default_rng(seed), decode=decode)
    tokens = shape.seqs * (1 if decode else MAX_CHUNK)
    q, k, v, sinks = _draw(jax.random.key(seed), jnp.asarray(lengths.visible), shape, tokens)
    hosted = (lengths.table, lengths.kv_lens, lengths.cu_q_lens)
    return lengths, (q, k, v, *(jnp.asarray(x, jnp.int32) for x in hosted), sinks)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _draw(key: jax.Array, visible: jax.Array, shape: Shape, tokens: int) -> Arrays:
    keys = jax.random.split(key, 4)
    pool = (visible.shape[0], shape.kv_heads, shape.page_size, shape.head_dim)
    q = jax.random.normal(keys[0], (tokens, shape.heads, shape.head_dim), shape.dtype)
    seen = visible[:, None, :, None]
    k, v = (jnp.where(seen, jax.random.normal(k, pool, shape.dtype), jnp.nan) for k in keys[1:3])
    sinks = jax.random.normal(keys[3], (shape.heads,)) if shape.has_sinks else None
    return q, k, v, sinks


def reference(lengths: Lengths, arguments: Arrays, shape: Shape, *, decode: bool) -> np.ndarray:
    """Dense float32 attention on the same 16-bit values, a padded row at a time."""
    q, k, v, _, kv_lens, cu_q_lens, sinks = arguments
    width = 1 if decode else MAX_CHUNK
    places = np.minimum(lengths.cu_q_lens[:-1, None] + np.arange(width), len(q) - 1)
    table = jnp.asarray(lengths.clean_table)
    rows = np.asarray(_dense(q[places], k, v, table, kv_lens, jnp.diff(cu_q_lens), sinks, shape))
    out = np.zeros(q.shape, np.float32)
    for row, (q_len, kv_len) in enumerate(zip(lengths.q_lens, lengths.kv_lens, strict=True)):
        start = lengths.cu_q_lens[row]
        out[start : start + q_len] = rows[row, :q_len] if kv_len else 0.0
    return out


@functools.partial(jax.jit, static_argnums=7)
def _dense(q, k_pages, v_pages, table, kv_lens, q_lens, sinks, shape):
    # einsum letters: T a row's tokens, K kv_heads, G group, L kv, H head_dim
    def one_row(row):
        q, ids, kv_len, q_len = row
        k, v = (
            jnp.nan_to_num(pool[ids].astype(jnp.float32))
            .swapaxes(0, 1)
            .reshape(shape.kv_heads, -1, shape.head_dim)
            for pool in (k_pages, v_pages)
        )
        q = q.astype(jnp.float32).reshape(len(q), shape.kv_heads, -1, shape.head_dim)
        logits = jnp.einsum("TKGH,KLH->TKGL", q, k) * shape.spec.scale
        if shape.soft_cap is not None:
            logits = shape.soft_cap * jnp.tanh(logits / shape.soft_cap)
        position = (kv_len - q_len + jnp.arange(len(q)))[:, None]
        place = jnp.arange(k.shape[1])[None, :]
        visible = place <= position
        if shape.window is not None:
            visible &= place > position - shape.window
        logits = jnp.where(visible[:, None, None, :], logits, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.reshape(1, shape.kv_heads, -1, 1), (*logits.shape[:3], 1))
            logits = jnp.concatenate([logits, sink], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]]
        return jnp.einsum("TKGL,KLH->TKGH", weights, v).reshape(len(q), -1, shape.head_dim)

    return jax.lax.map(one_row, (q, table, kv_lens, q_lens))


@functools.cache
def jitted_kernel(kernel: str, spec: AttentionSpec) -> Callable[..., jax.Array]:
    def decode(q, k, v, table, kv_lens, cu_q_lens, sinks):
        del cu_q_lens
        return decode_attention(q, k, v, table, kv_lens, sinks, spec=spec)

    return jax.jit(decode if kernel == "decode" else functools.partial(mixed_attention, spec=spec))


def check(kernel: str, cases: int, shapes: Sequence[Shape]) -> list[dict]:
    """Relative error of `cases` random cases a shape: the worst, and whether all pass."""
    results, decode = [], kernel == "decode"
    with jax.default_matmul_precision("highest"):
        for shape in shapes:
            errors = []
            for seed in range(cases):
                lengths, case = random_case(shape, seed, decode=decode)
                got = np.asarray(jitted_kernel(kernel, shape.spec)(*case).astype(jnp.float32))
                want = reference(lengths, case, shape, decode=decode)
                errors.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
            worst = max(errors, key=lambda error: (error != error, error))
            passed = all(error < MAX_ERROR for error in errors)
            results.append({"shape": repr(shape), "cases": cases, "worst": worst, "passed": passed})
            print(f"{'ok' if passed else 'FAIL':4} {kernel} {worst:.2e} {shape}", flush=True)
            if not passed:
                print("     errors:", " ".join(f"{error:.1e}" for error in errors), flush=True)
    return results


def timed_arguments(case: Timed, page_size: int, copies: int) -> tuple[list[Arrays], Arrays]:
    """`copies` sets of queries and pools, and the page table and lengths that all of them share."""
    kv_lens = np.asarray(case.kv_lens, np.int32)
    needed = -(-kv_lens // page_size)
    table = np.zeros((len(kv_lens), int(needed.max())), np.int32)
    pages = int(needed.sum()) + 1
    order, taken = np.random.default_rng(0).permutation(np.arange(1, pages)), 0
    for row, count in enumerate(needed):
        table[row, :count] = order[taken : taken + count]
        taken += count
    cu_q_lens = jnp.asarray(np.concatenate([[0], np.cumsum(case.q_lens)]), jnp.int32)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 3)
        pool = (pages, case.kv_heads, page_size, 128)
        q = jax.random.normal(keys[0], (sum(case.q_lens), case.heads, 128), jnp.bfloat16)
        return q, *(jax.random.normal(k, pool, jnp.bfloat16) for k in keys[1:])

    shared = (jnp.asarray(table), jnp.asarray(kv_lens), cu_q_lens, None)
    return [draw(jax.random.key(i)) for i in range(copies)], shared


def time_case(kernel: str, case: Timed, page_size: int) -> dict[str, float]:
    kv_bytes = 2 * sum(case.kv_lens) * case.kv_heads * 128 * 2
    copies = min(16, max(2, int(-(-4 * L2_BYTES // kv_bytes))))
    pairs = sum(q * n - q * (q - 1) // 2 for q, n in zip(case.q_lens, case.kv_lens, strict=True))
    flops = 4 * case.heads * 128 * pairs
    drawn, shared = timed_arguments(case, page_size, copies)
    calls = 2 * copies if sum(case.q_lens) > 1024 else 4 * copies
    # a query of its own for each call, or equal calls become one
    queries = [drawn[i % copies][0] + i for i in range(calls)]
    pools = [(k, v) for _, k, v in drawn]
    op = jitted_kernel(kernel, AttentionSpec(128**-0.5))

    @jax.jit
    def program(queries, pools, shared):
        return [op(q, *pools[i % copies], *shared) for i, q in enumerate(queries)]

    jax.block_until_ready(program(queries, pools, shared))
    seconds, runs = [], 2
    while len(seconds) < 4:  # the first only says how many runs outweigh the first one's dispatch
        start = time.perf_counter()
        for _ in range(runs):
            outs = program(queries, pools, shared)
        jax.block_until_ready(outs)
        seconds.append((time.perf_counter() - start) / (runs * calls))
        runs = max(2, int(0.08 / (seconds[0] * calls)))
    best = float(np.median(seconds[1:]))
    return {"us": best * 1e6, "TBs": kv_bytes / best / 1e12, "TFLOPs": flops / best / 1e12}


def time_all(kernels: Sequence[str], pages: Sequence[int], only: str) -> list[dict]:
    results = []
    for name, case in TIMED.items():
        is_decode = max(case.q_lens) == 1
        for kernel in kernels:
            if not name.startswith(only) or (kernel == "decode" and not is_decode):
                continue
            for page_size in pages:
                row = {"case": name, "kernel": kernel, "page": page_size}
                row |= time_case(kernel, case, page_size) | {"peer_us": case.peer_us}
                results.append(row)
                print(
                    f"{name:16} {kernel:6} page {page_size:3} {row['us']:8.1f} us "
                    f"{row['TBs']:6.3f} TB/s {row['TFLOPs']:6.1f} TFLOP/s  peer {case.peer_us} us",
                    flush=True,
                )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int, default=0, metavar="CASES")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--kernels", nargs="+", default=["decode", "mixed"])
    parser.add_argument("--pages", nargs="+", type=int, default=[16])
    parser.add_argument("--only", default="", help="time only cases whose name begins so")
    parser.add_argument("--shapes", nargs="+", type=int, default=range(len(SHAPES)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--split", action="store_true", help="decode with split rows")
    options = parser.parse_args(argv)
    if options.split:
        for head_dim in tuning.HEAD_DIMS:
            tiles = tuning.decode_tiles(head_dim)
            tuning.DECODE[head_dim] = dataclasses.replace(tiles, split=True)
    checks = {
        k: check(k, options.check, [SHAPES[i] for i in options.shapes])
        for k in options.kernels
        if options.check
    }
    times = time_all(options.kernels, options.pages, options.only) if options.time else []
    if options.out:
        record = {
            "command": " ".join(["python -m benchmarks.kernel_check", *(argv or sys.argv[1:])]),
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__, "numpy": np.__version__},
            "checks": checks,
            "times": times,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["passed"] for rows in checks.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
