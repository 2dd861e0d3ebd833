"""Device pytrees: what goes into a step and what comes out.

Frozen, registered, without defaults or optional arrays. Not checked at run time, because JAX
rebuilds these with shapes, shardings and plain objects in place of arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int16, Int32, UInt32

type Params = dict[str, Any]
"""The decoder's weights: the nested dict of `nnx.to_pure_dict`, layers unstacked."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """One layer's part of the page pool. Page 0 is the null page."""

    k: Float[Array, "pages kv_heads page_size head_dim"]
    v: Float[Array, "pages kv_heads page_size head_dim"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """One step's tokens from many sequences, laid end to end and padded to a bucket.

    Row `s` owns tokens `cu_q_lens[s] : cu_q_lens[s + 1]`. Padding rows own none; padding tokens
    come after the last row and write their KV to the null page.
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]  # place of each token in its own sequence, from 0
    slot_mapping: Int32[Array, " tokens"]  # where its KV goes: page_id * page_size + offset
    page_table: Int32[Array, "seqs pages_per_seq"]  # unused entries name the null page
    kv_lens: Int32[Array, " seqs"]  # tokens visible to the row's last query, itself included
    cu_q_lens: Int32[Array, " seqs+1"]  # running total of query lengths, from 0
    seq_slots: Int32[Array, " seqs"]  # the row's place in DeviceState; padding names the spare last
    from_last: Bool[Array, " tokens"]  # take this token from last_token_ids, not token_ids
    logit_rows: Int32[Array, " logits"]  # tokens whose logits are wanted
    is_decode_only: bool = field(metadata={"static": True})  # every row has at most one token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """How each row picks its next token. A temperature of 0 is greedy."""

    temperature: Float[Array, " seqs"]
    top_k: Int32[Array, " seqs"]  # 0 keeps all
    top_p: Float[Array, " seqs"]
    min_p: Float[Array, " seqs"]
    seed: UInt32[Array, "seqs 2"]  # low word, high word
    choice: Int32[Array, " seqs"]
    position: Int32[Array, " seqs"]  # place of the token to be sampled in its sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitEdits:
    """What the `full` sampler changes in the logits; `masked` has only bans and biases."""

    presence_penalty: Float[Array, " seqs"]
    frequency_penalty: Float[Array, " seqs"]
    repetition_penalty: Float[Array, " seqs"]
    counts_row: Bool[Array, " seqs"]  # the sampled token enters output_counts
    bias_ids: Int32[Array, "seqs biases"]
    bias_values: Float[Array, "seqs biases"]  # added to the logit; -inf bans, 0 is unused
    banned: UInt32[Array, "seqs mask_words"]  # bit t % 32 of word t // 32 bans token t
    processors: Int32[Array, " seqs"]  # bit i switches the i-th logits processor on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """All that changes on the device; donated to every step and returned by it.

    `output_counts[slot, token]` is twice the number of times that the sequence in this slot
    sampled the token, plus one if the token stands in its prompt.
    """

    kv_pages: tuple[KVPages, ...]  # one a layer
    last_token_ids: Int32[Array, " slots"]  # slots = max_num_seqs + 1, the last one spare
    output_counts: Int16[Array, "slots vocab"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads back after a step, in one transfer."""

    token_ids: Int32[Array, " seqs"]
    logprobs: Float[Array, " seqs"]  # of the sampled token, from the unedited logits
    is_finite: Bool[Array, " seqs"]  # False where the row's logits held NaN or infinity


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopLogprobs:
    """The logprob variant's addition, for every row of logits.

    A target is the token scored: the sampled one, or in a prompt the next. `ranks` count from 1.
    """

    target_logprobs: Float[Array, " logits"]
    ranks: Int32[Array, " logits"]
    top_ids: Int32[Array, "logits 20"]
    top_logprobs: Float[Array, "logits 20"]
