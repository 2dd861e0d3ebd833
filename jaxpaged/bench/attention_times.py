"""Times of the attention kernels on the cases of which the peer's times are known.

One jitted program calls the op many times over KV larger than the L2 cache, so that neither
dispatch nor the plan of the work, made once a step, counts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bench.attention_check import Arrays, jitted_kernel
from jaxpaged.bench.roofline import Ceilings
from jaxpaged.bench.targets import ATTENTION
from pallas_kernels.spec import AttentionSpec

L2_BYTES = 60e6
PEER_PAGE = 16
RAGGED = tuple(int(n) for n in np.random.RandomState(0).randint(32, 2048, 256))


@dataclass(frozen=True)
class Timed:
    """A case of bf16 with head_dim 128, and the time of FlashAttention 3 as vLLM 0.26 has it."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int
    kv_heads: int
    peer_us: float

    @property
    def kv_bytes(self) -> int:
        """K and V of every row, read once."""
        return 2 * sum(self.kv_lens) * self.kv_heads * 128 * 2

    @property
    def flops(self) -> int:
        pairs = [q * n - q * (q - 1) // 2 for q, n in zip(self.q_lens, self.kv_lens, strict=True)]
        return 4 * self.heads * 128 * sum(pairs)


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


def _arguments(case: Timed, page_size: int, copies: int) -> tuple[list[Arrays], Arrays]:
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


def _microseconds(kernel: str, case: Timed, page_size: int) -> float:
    copies = min(16, max(2, int(-(-4 * L2_BYTES // case.kv_bytes))))
    drawn, shared = _arguments(case, page_size, copies)
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
        jax.block_until_ready([program(queries, pools, shared) for _ in range(runs)][-1])
        seconds.append((time.perf_counter() - start) / (runs * calls))
        runs = max(2, int(0.08 / (seconds[0] * calls)))
    return 1e6 * float(np.median(seconds[1:]))


def time_case(name: str, kernel: str, page_size: int, ceilings: Ceilings | None) -> dict[str, Any]:
    """One line: what a call takes and achieves, its floor, and the figures beside it."""
    case = TIMED[name]
    us = _microseconds(kernel, case, page_size)
    line: dict[str, Any] = {"op": f"attention-{kernel}", "page": page_size, "us": round(us, 2)}
    line |= {"TB/s": round(case.kv_bytes / us / 1e6, 3), "TFLOP/s": round(case.flops / us / 1e6, 1)}
    if ceilings is not None:
        floor = 1e6 * max(case.kv_bytes / ceilings.bytes_per_s, case.flops / ceilings.flops_per_s)
        line |= {"roofline_us": round(floor, 2), "of_roofline": round(floor / us, 3)}
    target = ATTENTION.get(name)
    if page_size == PEER_PAGE:
        line["peer_us"] = case.peer_us
    if target is not None and page_size == PEER_PAGE:
        line |= {"measured": line[target.unit]} | target.columns()
    return line
