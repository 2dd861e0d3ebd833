"""Attention kernels against dense float32 attention: random ragged cases on poisoned pages.

NaN stands in every place that must not be read, nonsense in the page table past each row's end.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_attention.decode_kernel import decode_attention
from pallas_kernels.ragged_attention.prefill_kernel import mixed_attention
from pallas_kernels.spec import AttentionSpec

KERNELS = ("decode", "mixed")
MAX_ERROR = 1e-2
MAX_CHUNK = 200  # query tokens a row of a random case

type Arrays = tuple[Any, ...]
"""Arguments of an attention op: arrays, and None for no sinks."""


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
    if decode:  # the kernel takes some queries of the next row along
        q = jnp.where(jnp.asarray(lengths.kv_lens > 0)[:, None, None], q, jnp.nan)
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


def check(kernel: str, cases: int, shapes: Sequence[Shape] = SHAPES) -> list[dict[str, Any]]:
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
            results.append(verdict(f"attention-{kernel}", repr(shape), errors, MAX_ERROR))
    return results


def verdict(op: str, shape: str, errors: Sequence[float], most: float) -> dict[str, Any]:
    """A line on one shape's cases."""
    largest = worst(errors)
    line = {"op": op, "cases": len(errors), "worst": float(f"{largest:.3g}"), "most": most}
    return line | {"passed": largest < most, "shape": shape}


def worst(errors: Sequence[float]) -> float:
    """The largest, or NaN where one is."""
    return max(errors, key=lambda error: (error != error, error))
