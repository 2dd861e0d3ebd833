"""The compiled step: one packed buffer in, one out, the state donated.

Prefill, chunk, decode and scoring are this same function at different buckets.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int16, Int32

from jaxpaged.arrays import DeviceState, LogitEdits, Params, RaggedBatch, SamplingBatch, TopLogprobs
from jaxpaged.core.packing import PackedField, PackedLayout
from jaxpaged.layers.sampling import (
    TOP_LOGPROBS,
    LogitsProcessor,
    edit_logits,
    pick,
    pick_greedy,
    score,
    token_logprobs,
)

type StepFunction = Callable[[Params, DeviceState, Array], tuple[DeviceState, Array]]


def make_step(
    graphdef: nnx.GraphDef, layout: PackedLayout, processors: tuple[LogitsProcessor, ...]
) -> StepFunction:
    """The step for one bucket: write this batch's KV, attend, sample one token a row.

    A row whose prompt is not complete gets a token too; the scheduler drops it. The result's second
    part is `i32[seqs, 3]` (token id, bits of its logprob, finite or not), followed for the samplers
    `full` and `scored` by `i32[logits, 2 + 2 * 20]` (bits of the target's logprob, its rank, the
    likeliest ids, bits of their logprobs), all flat.
    """

    def step(params: Params, state: DeviceState, packed: Int32[Array, " words"]):
        fields = unpack(layout, packed)
        batch = ragged_batch(layout, fields)
        model = nnx.merge(graphdef, params)
        hidden, state = model(batch, state)
        logits = model.unembed(hidden[batch.logit_rows])
        rows = logits if layout.bucket.sampler != "scored" else logits[fields["sample_rows"]]
        tokens, state = _sample(layout, fields, rows, state, batch.seq_slots, processors)
        last = state.last_token_ids.at[batch.seq_slots].set(tokens)
        state = replace(state, last_token_ids=last)
        words = [_step_words(rows, tokens)]
        if layout.bucket.sampler in ("full", "scored"):
            words.append(_top_words(score(logits, _targets(layout, fields, tokens))))
        return state, jnp.concatenate(words)

    return step


def unpack(layout: PackedLayout, packed: Int32[Array, " words"]) -> dict[str, Array]:
    """Cut the buffer into its fields and give each its own type back."""
    return {f.name: _typed(f, packed[f.offset : f.offset + f.size]) for f in layout.fields}


def ragged_batch(layout: PackedLayout, fields: dict[str, Array]) -> RaggedBatch:
    return RaggedBatch(
        token_ids=fields["token_ids"],
        positions=fields["positions"],
        slot_mapping=fields["slot_mapping"],
        page_table=fields["page_table"],
        kv_lens=fields["kv_lens"],
        cu_q_lens=fields["cu_q_lens"],
        seq_slots=fields["seq_slots"],
        from_last=fields["from_last"],
        logit_rows=fields["logit_rows"],
        is_decode_only=layout.bucket.kind == "decode",
    )


def reset_counts(
    counts: Int16[Array, "slots vocab"],
    slot: Int32[Array, ""],
    token_ids: Int32[Array, " tokens"],
    num_prompt_tokens: Int32[Array, ""],
    num_tokens: Int32[Array, ""],
) -> Int16[Array, "slots vocab"]:
    """Write one sequence's history into its slot of `output_counts`; the end of it is padding."""
    place = jnp.arange(token_ids.shape[0])
    row = jnp.zeros(counts.shape[1], jnp.int16)
    row = row.at[token_ids].max((place < num_prompt_tokens).astype(jnp.int16))
    sampled = (place >= num_prompt_tokens) & (place < num_tokens)
    return counts.at[slot].set(row.at[token_ids].add(2 * sampled.astype(jnp.int16)))


def _sample(layout, fields, logits, state, slots, processors):
    if layout.bucket.sampler == "greedy":
        return pick_greedy(logits), state
    sampling = SamplingBatch(**{name: fields[name] for name in SamplingBatch.__dataclass_fields__})
    if layout.bucket.sampler == "sampled":
        return pick(logits, sampling), state
    edits = LogitEdits(**{name: fields[name] for name in LogitEdits.__dataclass_fields__})
    counts = state.output_counts[slots]
    tokens = pick(edit_logits(logits, counts, sampling.position, edits, processors), sampling)
    added = 2 * edits.counts_row.astype(jnp.int16)
    return tokens, replace(state, output_counts=state.output_counts.at[slots, tokens].add(added))


def _targets(layout: PackedLayout, fields: dict[str, Array], tokens: Array) -> Array:
    """The token scored at each row of logits: a prompt's next one, or the one just sampled."""
    if layout.bucket.sampler == "full":
        return tokens
    num_logits = layout.bucket.num_logits
    rows = jnp.where(
        fields["kv_lens"] > 0, fields["sample_rows"], num_logits
    )  # padding rows: dropped
    sampled = jnp.zeros(num_logits, jnp.int32).at[rows].set(tokens, mode="drop")
    return jnp.where(fields["targets"] >= 0, fields["targets"], sampled)


def _typed(f: PackedField, words: Array) -> Array:
    words = words.reshape(f.shape)
    if f.dtype == "bool":
        return words != 0
    return words if f.dtype == "int32" else jax.lax.bitcast_convert_type(words, jnp.dtype(f.dtype))


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _step_words(logits: Array, tokens: Array) -> Array:
    logprobs = token_logprobs(logits, tokens)
    is_finite = jnp.isfinite(jax.nn.logsumexp(logits, axis=-1)).astype(jnp.int32)
    return jnp.stack([tokens, _bits(logprobs), is_finite], axis=1).reshape(-1)


def _top_words(top: TopLogprobs) -> Array:
    columns = [
        _bits(top.target_logprobs)[:, None],
        top.ranks[:, None],
        top.top_ids,
        _bits(top.top_logprobs),
    ]
    return jnp.concatenate(columns, axis=1).reshape(-1)


TOP_WORDS = 2 + 2 * TOP_LOGPROBS
STEP_WORDS = 3
