"""Who does what in a mixed launch: the plan, made once a step, and a program's share of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import tuning
from pallas_kernels.ragged_attention import kernel_parts as parts
from pallas_kernels.spec import AttentionSpec


@dataclass(frozen=True)
class MixedStatic:
    """Everything known when the kernel is traced."""

    tokens: int
    seqs: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: Any
    has_sinks: bool
    spec: AttentionSpec
    tiles: tuning.MixedTiles

    @property
    def programs(self) -> int:
        return tuning.MULTIPROCESSORS

    @property
    def warpgroup_tokens(self) -> int:
        return parts.WARPGROUP_ROWS // self.group

    @property
    def whole_tokens(self) -> bool:
        """Whether tokens fill a warpgroup's rows: one copy then takes many of them."""
        return parts.WARPGROUP_ROWS % self.group == 0

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of a warpgroup's results in shared memory."""
        if self.whole_tokens:
            return (self.warpgroup_tokens, self.group, self.head_dim)
        return (parts.WARPGROUP_ROWS, self.head_dim)

    @property
    def item_tokens(self) -> int:
        return self.warpgroup_tokens * self.tiles.warpgroups

    @property
    def max_runs(self) -> int:
        """Most runs of tokens that a batch can hold: full ones, and a rest for each row."""
        return self.tokens // self.item_tokens + self.seqs


@dataclass(frozen=True)
class Item:
    """A run of tokens of a row with one KV head. Tiles count from the row's first token."""

    row: jax.Array
    head: jax.Array
    token: jax.Array  # the run's first, in the batch
    tokens: jax.Array  # from there to the row's end
    position: jax.Array  # of the run's first token in its sequence
    kv_len: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    masked: jax.Array  # tiles at the end that some query sees in part, one at least


def plan_mixed(
    kv_lens: Int32[Array, " seqs"], cu_q_lens: Int32[Array, " seqs+1"], static: MixedStatic
) -> Int32[Array, " words"]:
    """Cut the rows into runs of tokens and order them, the dearest first.

    Words: number of runs; then of each run its row; then its first token in the row.
    """
    s, width, block = static, jnp.int32(static.item_tokens), jnp.int32(static.tiles.block_kv)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    row_runs = lax.div(q_lens + (width - 1), width)
    rows = jnp.arange(s.seqs, dtype=jnp.int32)
    begun = rows[None, :] <= rows[:, None]
    ends = jnp.sum(jnp.where(begun, row_runs[None, :], 0), axis=1, dtype=jnp.int32)
    run = jnp.arange(s.max_runs, dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= run[:, None], axis=1, dtype=jnp.int32)
    is_run, row = row < s.seqs, jnp.minimum(row, s.seqs - 1)
    first = (run - (ends - row_runs)[row]) * width
    position = (kv_lens - q_lens)[row] + first
    low = jnp.int32(0) if s.spec.window is None else jnp.maximum(position + 1 - s.spec.window, 0)
    high = jnp.minimum(position + width, kv_lens[row])
    cost = jnp.where(is_run, lax.div(high + (block - 1), block) - lax.div(low, block), -1)
    # the place of each run in the order, by counting the runs before it: cheaper than a sort here
    dearer = cost[None, :] > cost[:, None]
    earlier = (cost[None, :] == cost[:, None]) & (run[None, :] < run[:, None])
    place = jnp.sum(dearer | earlier, axis=1, dtype=jnp.int32)
    chosen = place[None, :] == run[:, None]
    row, first = (jnp.sum(jnp.where(chosen, x, 0), axis=1, dtype=jnp.int32) for x in (row, first))
    return jnp.concatenate([ends[-1:], row, first])


def for_each_item(static: MixedStatic, refs: Any, visit: Callable, carry: Any) -> Any:
    """Visit this program's items, dealt out from the order there and back, and there again."""
    s, programs = static, jnp.int32(static.programs)
    program = lax.axis_index("program")
    items = refs.plan[0] * s.kv_heads
    rounds, rest = lax.div(items, programs), lax.rem(items, programs)
    last_place = jnp.where(lax.rem(rounds, jnp.int32(2)) == 0, program, programs - 1 - program)
    rounds = rounds + jnp.where(last_place < rest, 1, 0)
    backwards = lax.rem(program, jnp.int32(2)) == 1

    def visit_round(i, carry):
        deal = jnp.where(backwards, rounds - 1 - i, i)
        place = jnp.where(lax.rem(deal, jnp.int32(2)) == 0, program, programs - 1 - program)
        return visit(_read_item(s, refs, deal * programs + place), carry)

    return lax.fori_loop(0, rounds, visit_round, carry)


def _read_item(static: MixedStatic, refs: Any, index: jax.Array) -> Item:
    s, block = static, jnp.int32(static.tiles.block_kv)
    run, head = lax.div(index, jnp.int32(s.kv_heads)), lax.rem(index, jnp.int32(s.kv_heads))
    row, first = refs.plan[1 + run], refs.plan[1 + s.max_runs + run]
    start, kv_len = refs.cu_q_lens[row], refs.lens[row]
    q_len = refs.cu_q_lens[row + 1] - start
    position = kv_len - q_len + first
    low = jnp.int32(0)
    if s.spec.window is not None:
        low = jnp.maximum(position + 1 - s.spec.window, 0)
    high = jnp.minimum(position + s.item_tokens, kv_len)
    first_tile = lax.div(low, block)
    tiles = lax.div(high + (block - 1), block) - first_tile
    seen_by_all = tiles if s.spec.window is not None else tiles - lax.div(position + 1, block)
    return Item(
        row=row,
        head=head,
        token=start + first,
        tokens=q_len - first,
        position=position,
        kv_len=kv_len,
        first_tile=first_tile,
        tiles=tiles,
        masked=jnp.maximum(seen_by_all, 1),
    )
