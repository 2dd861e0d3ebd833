"""The compiled step in its two programs, each with one packed buffer; the state is donated.

Prefill, chunk, decode and scoring are these same functions at different buckets. A greedy step
needs the first alone. Between the two a grammar's mask, which depends on the step before, has time
to arrive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int16, Int32

from jaxpaged.arrays import (
    DeviceState,
    KVPages,
    LogitEdits,
    Params,
    RaggedBatch,
    SamplingBatch,
    TopLogprobs,
)
from jaxpaged.config.settings import LogprobsMode
from jaxpaged.core.buckets import SamplerKind
from jaxpaged.core.packing import PackedField, PackedLayout
from jaxpaged.engine.drafting import DraftModel
from jaxpaged.layers.sampling import (
    TOP_LOGPROBS,
    LogitsProcessor,
    as_logits,
    ban_and_bias,
    edit_logits,
    filtered,
    log_total,
    pick,
    pick_greedy,
    row_status,
    score,
    tell_instead,
    token_logprobs,
)
from jaxpaged.models.decoder import Decoder
from jaxpaged.sharding import local_ids

type Pool = tuple[KVPages, ...]
type ForwardFunction = Callable[[Params, DeviceState, Array], tuple[DeviceState, Array, Array]]
type LastFunction = Callable[[Params, DeviceState, Array, Array], tuple[DeviceState, Array, Array]]
type InnerFunction = Callable[[Params, Pool, Array, Array], tuple[Array, Pool]]
type ChainFunction = Callable[[Params, DeviceState, Array], tuple[DeviceState, Array]]
type SampleFunction = Callable[[SamplerState, Array, Array], tuple[SamplerState, Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The part of `DeviceState` that sampling changes."""

    last_token_ids: Int32[Array, " slots"]
    output_counts: Int16[Array, "slots vocab"]

    def put_into(self, state: DeviceState) -> DeviceState:
        """The whole state with this part in its place."""
        return replace(state, last_token_ids=self.last_token_ids, output_counts=self.output_counts)


def make_forward(
    graphdef: nnx.GraphDef, layout: PackedLayout, draft: DraftModel | None = None
) -> ForwardFunction:
    """The first program of a step: write this batch's KV, attend, pick each row's largest logit.

    Results: the state, f32 logits [logits, vocab], and what `make_sample` tells of a greedy step,
    empty where a prompt is scored. A step that samples otherwise overwrites the tokens. Where
    `draft` has guessed the tokens of a step, these come behind.
    """

    def forward(params: Params, state: DeviceState, packed: Int32[Array, " words"]):
        batch, local = _unpacked(layout, packed)
        pages, is_guessed = (), draft is not None and layout.bucket.kind == "draft"
        if draft is not None:
            mine, params = draft.take_params(params)
            state, pages, batch = draft.run(mine, state, batch, layout.bucket)
            local = replace(local, token_ids=batch.token_ids)
        model = nnx.merge(graphdef, params)
        hidden, state = model(batch, state, local)
        state = replace(state, kv_pages=state.kv_pages + pages)
        state, logits, told = _with_logits(model, layout, batch, hidden, state)
        return state, logits, jnp.append(told, batch.token_ids) if is_guessed else told

    return forward


def make_inner(graphdef: nnx.GraphDef, layout: PackedLayout) -> InnerFunction:
    """What a stage before the last one does of a forward pass; its pages are donated.

    It takes `last_token_ids` where it is the first one, else hidden states, and gives hidden states
    [tokens, embed] and its pages.
    """

    def inner(params: Params, kv_pages: Pool, packed: Int32[Array, " words"], given: Array):
        batch, local = _unpacked(layout, packed)
        return nnx.merge(graphdef, params).pass_on(given, batch, kv_pages, local)

    return inner


def make_last(graphdef: nnx.GraphDef, layout: PackedLayout) -> LastFunction:
    """What the last stage does: all that `make_forward` does after the layers of those before."""

    def last(params: Params, state: DeviceState, packed: Int32[Array, " words"], given: Array):
        batch, local = _unpacked(layout, packed)
        model = nnx.merge(graphdef, params)
        hidden, state = model.finish(given, batch, state, local)
        return _with_logits(model, layout, batch, hidden, state)

    return last


def make_sample(
    layout: PackedLayout,
    processors: tuple[LogitsProcessor, ...],
    mode: LogprobsMode = "raw_logprobs",
) -> SampleFunction:
    """The second program, where greedy is not enough: a token a row, kept for the next step too.

    A row whose prompt is not complete gets a token too; the scheduler drops it. The result's second
    part is `i32[seqs, 3]` (token id, bits of its logprob, `FINITE` and `BANNED`), followed for the
    samplers `full` and `scored` by `i32[logits, 2 + 2 * 20]` (bits of the target's logprob, its
    rank, the likeliest ids, bits of their logprobs), all flat.
    """
    sampler = layout.bucket.sampler

    def sample(state: SamplerState, logits: Array, packed: Int32[Array, " words"]):
        fields = unpack(layout.sample, packed)
        rows = logits
        if sampler == "scored":  # padding rows take the last row: nobody reads what they sample
            rows = logits[jnp.minimum(fields["sample_rows"], len(logits) - 1)]
        tokens, edited, state = _sample(sampler, fields, rows, state, processors)
        last = state.last_token_ids.at[fields["sample_slots"]].set(tokens)
        words = [_step_words(rows, tokens, None if edited is rows else edited)]
        if sampler in ("full", "scored"):
            words.append(_top_words(_told(layout, fields, logits, edited, tokens, mode)))
        return replace(state, last_token_ids=last), jnp.concatenate(words)

    return sample


def make_chain(
    forward: ForwardFunction, sample: SampleFunction | None, layout: PackedLayout
) -> ChainFunction:
    """Several steps in one program, each with the tokens of the one before it.

    It takes what `PackedLayout.chained` made, and gives the state and each step's words, one row
    a step. `sample` is None where the forward program samples.
    """

    def chain(params: Params, state: DeviceState, packed: Int32[Array, "steps words"]):
        def one(state: DeviceState, words: Array) -> tuple[DeviceState, Array]:
            state, logits, told = forward(params, state, words[: layout.forward_size])
            if sample is None:
                return state, told
            start = layout.sample_start
            small = SamplerState(state.last_token_ids, state.output_counts)
            small, told = sample(small, logits, words[start : start + layout.sample_size])
            return small.put_into(state), told

        return jax.lax.scan(one, state, packed)

    return chain


def unpack(layout: tuple[PackedField, ...], packed: Int32[Array, " words"]) -> dict[str, Array]:
    """Cut a buffer into its fields and give each its own type back."""
    return {f.name: _typed(f, packed[f.offset : f.offset + f.size]) for f in layout}


def _unpacked(layout: PackedLayout, packed: Array) -> tuple[RaggedBatch, RaggedBatch]:
    """The batch, and as layers with a window see it."""
    fields = unpack(layout.forward, packed)
    batch = local = ragged_batch(layout, fields)
    if layout.has_local_table:
        table, slots = fields["local_page_table"], fields["local_slot_mapping"]
        local = replace(batch, page_table=table, slot_mapping=slots)
    return batch, local


def _with_logits(
    model: Decoder, layout: PackedLayout, batch: RaggedBatch, hidden: Array, state: DeviceState
) -> tuple[DeviceState, Array, Array]:
    logits = model.unembed(hidden[batch.logit_rows])
    if not layout.bucket.forward_samples:
        return state, logits, jnp.zeros(0, jnp.int32)
    tokens = last = pick_greedy(logits)
    if layout.bucket.kind == "draft":  # of rows with drafts nobody takes it from here
        last = tokens[batch.cu_q_lens[1:] - 1]
    last = state.last_token_ids.at[batch.seq_slots].set(last)
    return replace(state, last_token_ids=last), logits, _step_words(logits, tokens)


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
    token_ids = local_ids(token_ids, len(row))
    row = row.at[token_ids].max((place < num_prompt_tokens).astype(jnp.int16))
    sampled = (place >= num_prompt_tokens) & (place < num_tokens)
    return counts.at[slot].set(row.at[token_ids].add(2 * sampled.astype(jnp.int16)))


def _sample(
    sampler: SamplerKind,
    fields: dict[str, Array],
    logits: Array,
    state: SamplerState,
    processors: tuple[LogitsProcessor, ...],
) -> tuple[Array, Array, SamplerState]:
    """A token a row, the logits that it was picked from, and the state."""
    if sampler == "greedy":
        return pick_greedy(logits), logits, state
    sampling = SamplingBatch(**{name: fields[name] for name in SamplingBatch.__dataclass_fields__})
    if sampler == "sampled":
        return pick(logits, sampling), logits, state
    if sampler == "masked":
        edited = ban_and_bias(logits, fields["banned"], fields["bias_ids"], fields["bias_values"])
        return pick(edited, sampling), edited, state
    edits = LogitEdits(**{name: fields[name] for name in LogitEdits.__dataclass_fields__})
    slots = fields["sample_slots"]
    counts = state.output_counts[slots]
    edited = edit_logits(logits, counts, sampling.position, edits, processors)
    tokens = pick(edited, sampling)
    added = 2 * edits.counts_row.astype(jnp.int16)
    places = local_ids(tokens, counts.shape[1])
    counts = state.output_counts.at[slots, places].add(added)
    return tokens, edited, replace(state, output_counts=counts)


def _told(
    layout: PackedLayout,
    fields: dict[str, Array],
    logits: Array,
    edited: Array,
    tokens: Array,
    mode: LogprobsMode,
) -> TopLogprobs:
    """What is told of each row of logits, where someone may want logprobs."""
    if layout.bucket.sampler == "full":
        rows = jnp.arange(layout.bucket.num_samples, dtype=jnp.int32)
    else:
        rows = fields["sample_rows"]
    if mode.startswith("processed"):
        sampling = {name: fields[name] for name in SamplingBatch.__dataclass_fields__}
        processed = filtered(edited, SamplingBatch(**sampling))
        logits = logits.at[rows].set(processed, mode="drop")
    top = score(logits, _targets(layout, fields, tokens))
    top = tell_instead(top, logits, rows, fields["told_ids"])
    return as_logits(top, logits) if mode.endswith("logits") else top


def _targets(layout: PackedLayout, fields: dict[str, Array], tokens: Array) -> Array:
    """The token scored at each row of logits: a prompt's next one, or the one just sampled."""
    if layout.bucket.sampler == "full":
        return tokens
    sampled = jnp.zeros(layout.bucket.num_logits, jnp.int32)
    sampled = sampled.at[fields["sample_rows"]].set(tokens, mode="drop")  # padding rows: dropped
    return jnp.where(fields["targets"] >= 0, fields["targets"], sampled)


def _typed(f: PackedField, words: Array) -> Array:
    words = words.reshape(f.shape)
    if f.dtype == "bool":
        return words != 0
    return words if f.dtype == "int32" else jax.lax.bitcast_convert_type(words, jnp.dtype(f.dtype))


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _step_words(logits: Array, tokens: Array, edited: Array | None = None) -> Array:
    total = log_total(logits)
    logprobs = token_logprobs(logits, tokens, total)
    status = row_status(total, edited)
    return jnp.stack([tokens, _bits(logprobs), status], axis=1).reshape(-1)


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
