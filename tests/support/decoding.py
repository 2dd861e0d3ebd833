"""Runs a loaded model over one sequence, chunk by chunk, on poisoned pages."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxpaged.arrays import DeviceState, RaggedBatch
from jaxpaged.config.architecture import ModelConfig
from jaxpaged.models.decoder import init_device_state

PAGE_SIZE, PAGES_PER_SEQ, ROW_SLOT, SPARE_SLOT = 4, 16, 1, 2


def poisoned_state(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> DeviceState:
    """NaN in every page but the null page, which takes the writes of padding."""
    state = init_device_state(config, PAGES_PER_SEQ + 1, PAGE_SIZE, SPARE_SLOT, dtype)
    poison = jax.tree.map(lambda pages: pages.at[1:].set(np.nan), state.kv_pages)
    return replace(state, kv_pages=poison)


def one_row_batch(
    token_ids: list[int], start: int, *, padding: int = 0, decode_only: bool = False
) -> RaggedBatch:
    """Tokens of one sequence from place `start` on; pages are handed out backwards."""
    count, end = len(token_ids), start + len(token_ids)
    page_ids = np.arange(PAGES_PER_SEQ, 0, -1, dtype=np.int32)
    places = np.arange(start, end, dtype=np.int32)
    slots = page_ids[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
    rows = 2 if padding else 1  # the second row is padding
    page_table = np.zeros((rows, PAGES_PER_SEQ), np.int32)
    page_table[0, : -(-end // PAGE_SIZE)] = page_ids[: -(-end // PAGE_SIZE)]
    batch = RaggedBatch(
        token_ids=np.pad(np.array(token_ids, np.int32), (0, padding)),
        positions=np.pad(places, (0, padding)),
        slot_mapping=np.pad(slots.astype(np.int32), (0, padding)),
        page_table=page_table,
        kv_lens=np.array([end, 0][:rows], np.int32),
        cu_q_lens=np.array([0, count, count][: rows + 1], np.int32),
        seq_slots=np.array([ROW_SLOT, SPARE_SLOT][:rows], np.int32),
        from_last=np.zeros(count + padding, bool),
        logit_rows=np.arange(count + padding, dtype=np.int32),
        is_decode_only=decode_only,
    )
    return jax.tree.map(jnp.asarray, batch)


# compiling takes nearly all the time of a tiny model, so it is told not to try hard
@partial(
    jax.jit,
    static_argnums=0,
    donate_argnums=2,
    compiler_options={"xla_backend_optimization_level": 0},
)
def forward(graphdef: nnx.GraphDef, params: Any, state: DeviceState, batch: RaggedBatch):
    """One step without a sampler: the new state, and logits of `logit_rows`."""
    decoder = nnx.merge(graphdef, params)
    hidden, state = decoder(batch, state)
    return state, decoder.unembed(hidden[batch.logit_rows])


def logits_of(
    graphdef: nnx.GraphDef,
    params: Any,
    config: ModelConfig,
    token_ids: list[int],
    chunks: list[int],
    dtype: DTypeLike = jnp.float32,
) -> NDArray[np.float32]:
    """Logits of every token, computed in `chunks`; a chunk of 1 is a decode step.

    Longer chunks are padded to one size, past the longest, so that two programs do for all.
    """
    state, rows, start = poisoned_state(config, dtype), [], 0
    for count in chunks:
        ids = token_ids[start : start + count]
        padding = 0 if count == 1 else max(chunks) + 1 - count
        batch = one_row_batch(ids, start, padding=padding, decode_only=count == 1)
        state, logits = forward(graphdef, params, state, batch)
        rows.append(np.asarray(logits)[:count])
        start += count
    return np.concatenate(rows)
