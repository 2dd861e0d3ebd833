"""From logits to token ids, on the device.

Order as in vLLM: allowed ids and biases, penalties, named processors, temperature, min-p, top-k and
top-p, then one draw by Gumbel noise whose key depends on seed, choice and place alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int16, Int32, UInt32

from jaxpaged.arrays import LogitEdits, SamplingBatch, TopLogprobs
from jaxpaged.layers.noise import gumbel_noise
from jaxpaged.sharding import local_ids, shard_index, split_axis
from pallas_kernels.sampling import (
    best_token,
    filter_logits,
    log_sum_exp,
    logit_of,
    logits_of,
    max_over,
    rank_of,
    top_n_logprobs,
)

GREEDY_BELOW = 1e-5  # a temperature under this picks the largest logit
TOP_LOGPROBS = 20
FINITE, BANNED = 1, 2  # bits of a row's status


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorState:
    """What a named logits processor may look at, one row a sequence."""

    output_counts: Int32[Array, "seqs vocab"]  # how often each token was sampled
    in_prompt: Bool[Array, "seqs vocab"]
    position: Int32[Array, " seqs"]  # place of the token to be sampled


type LogitsProcessor = Callable[
    [Float[Array, "seqs vocab"], ProcessorState], Float[Array, "seqs vocab"]
]
"""A traceable function over all rows; it is applied to those that name it."""


def row_keys(sampling: SamplingBatch) -> Array:
    """One key a row: fold choice and position into the key of both seed words."""

    def one_row(seed, choice, position):
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
        return jax.random.fold_in(jax.random.fold_in(key, choice), position)

    return jax.vmap(one_row)(sampling.seed, sampling.choice, sampling.position)


def pick_greedy(logits: Float[Array, "seqs vocab"]) -> Int32[Array, " seqs"]:
    """The largest logit of each row; of equal ones the lowest id."""
    return best_token(logits, split_axis())


def pick(logits: Float[Array, "seqs vocab"], sampling: SamplingBatch) -> Int32[Array, " seqs"]:
    """Sample every row by its own temperature, top-k, top-p, min-p and key."""
    is_greedy = sampling.temperature < GREEDY_BELOW
    kept = filtered(logits, sampling)
    noise = gumbel_noise(row_keys(sampling), logits.shape[-1])
    if jax.default_backend() == "cpu":
        # merged into the argmax the noise is made anew for each comparison: twice as slow there
        noise = jax.lax.optimization_barrier(noise)
    # a row whose logits are NaN must still give a token id inside the vocabulary
    return pick_greedy(jnp.where(is_greedy[:, None], logits, kept + noise))


def filtered(
    logits: Float[Array, "seqs vocab"], sampling: SamplingBatch
) -> Float[Array, "seqs vocab"]:
    """Scale by temperature (a greedy row is not) and take out what is filtered away, as -inf."""
    is_greedy = sampling.temperature < GREEDY_BELOW
    temperature = jnp.where(is_greedy, 1.0, sampling.temperature)
    filters = (sampling.top_k, sampling.top_p, sampling.min_p)
    return filter_logits(logits, temperature, *filters, axis=split_axis())


def ban_and_bias(
    logits: Float[Array, "seqs vocab"],
    banned: UInt32[Array, "seqs mask_words"],
    bias_ids: Int32[Array, "seqs biases"],
    bias_values: Float[Array, "seqs biases"],
) -> Float[Array, "seqs vocab"]:
    """The part of `edit_logits` that looks at nothing but the request; see `LogitEdits`."""
    vocab = logits.shape[-1]
    token = jnp.arange(vocab) + shard_index() * vocab
    words = banned[:, token // 32]
    allowed = (words >> (token % 32).astype(jnp.uint32)[None, :]) & jnp.uint32(1) == 0
    logits = jnp.where(allowed, logits, -jnp.inf)
    rows = jnp.arange(logits.shape[0])[:, None]
    bias_ids = local_ids(bias_ids, vocab)
    bias_ids = jnp.where(bias_values == 0, vocab, bias_ids)  # unused ones: dropped
    return logits.at[rows, bias_ids].add(bias_values, mode="drop")


def edit_logits(
    logits: Float[Array, "seqs vocab"],
    counts: Int16[Array, "seqs vocab"],
    position: Int32[Array, " seqs"],
    edits: LogitEdits,
    processors: tuple[LogitsProcessor, ...],
) -> Float[Array, "seqs vocab"]:
    """Apply masks, biases, penalties and processors; `counts` are rows of `output_counts`."""
    logits = ban_and_bias(logits, edits.banned, edits.bias_ids, edits.bias_values)
    sampled = (counts >> 1).astype(jnp.int32)
    seen = counts > 0
    repetition = edits.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, penalised, logits)
    logits = logits - edits.frequency_penalty[:, None] * sampled.astype(jnp.float32)
    logits = logits - edits.presence_penalty[:, None] * (sampled > 0).astype(jnp.float32)

    for bit, processor in enumerate(processors):
        state = ProcessorState(sampled, (counts & 1) != 0, position)
        wanted = (edits.processors >> bit) & 1 != 0
        logits = jnp.where(wanted[:, None], processor(logits, state), logits)
    return logits


def log_total(logits: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """The logarithm of the sum that turns logits into probabilities; not finite where any is."""
    return log_sum_exp(logits, split_axis())


def token_logprobs(
    logits: Float[Array, "rows vocab"],
    token_ids: Int32[Array, " rows"],
    total: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """Natural log-probability of one token a row; `total` is `log_total` of the same logits."""
    return logit_of(logits, token_ids, split_axis()) - total


def row_status(
    total: Float[Array, " rows"], edited: Float[Array, "rows vocab"] | None
) -> Int32[Array, " rows"]:
    """`FINITE` where the model's logits are; `BANNED` where all are -inf in `edited`.

    To look at the picked token's alone would keep `edited` in memory until there is one.
    """
    status = jnp.isfinite(total).astype(jnp.int32) * FINITE
    if edited is None:
        return status
    is_banned = max_over(jnp.max(edited, axis=-1), split_axis()) == -jnp.inf
    return status | is_banned.astype(jnp.int32) * BANNED


def score(logits: Float[Array, "rows vocab"], targets: Int32[Array, " rows"]) -> TopLogprobs:
    """Logprob and rank of one token a row, and the likeliest 20."""
    total = log_total(logits)
    axis = split_axis()
    top_ids, top_logprobs = top_n_logprobs(logits, TOP_LOGPROBS, axis=axis)
    ranks = rank_of(logits, targets, axis=axis)
    return TopLogprobs(token_logprobs(logits, targets, total), ranks, top_ids, top_logprobs)


def tell_instead(
    top: TopLogprobs,
    logits: Float[Array, "logits vocab"],
    rows: Int32[Array, " seqs"],
    told_ids: Int32[Array, "seqs 20"],
) -> TopLogprobs:
    """`top` with named tokens for the likeliest, in those of `rows` whose first id is not -1."""
    ours = jnp.minimum(rows, logits.shape[0] - 1)
    is_told = told_ids[:, :1] >= 0
    mine = logits[ours]
    named = logits_of(mine, told_ids, split_axis()) - log_total(mine)[:, None]
    ids = jnp.where(is_told, told_ids, top.top_ids[ours])
    logprobs = jnp.where(is_told, named, top.top_logprobs[ours])
    return replace(
        top,
        top_ids=top.top_ids.at[rows].set(ids, mode="drop"),
        top_logprobs=top.top_logprobs.at[rows].set(logprobs, mode="drop"),
    )


def as_logits(top: TopLogprobs, logits: Float[Array, "logits vocab"]) -> TopLogprobs:
    """`top` with logits in place of their logprobs."""
    total = log_total(logits)
    return replace(
        top,
        target_logprobs=top.target_logprobs + total,
        top_logprobs=top.top_logprobs + total[:, None],
    )
