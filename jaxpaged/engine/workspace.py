"""What a step needs while it runs, estimated before anything is compiled."""

import numpy as np

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.core.buckets import MAX_SCORED_TOKENS

LOGIT_COPIES = 3  # float32 logits of all rows that the `full` sampler holds at once
LIBRARY_BYTES = 64 * 2**20  # workspace of the matrix products' library


def workspace_bytes(
    model: ModelConfig,
    dtype: np.dtype,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_stages: int = 1,
) -> int:
    """What a step needs beside weights, pool and slots: activations and logits.

    The largest moment counts: the feed-forward or the attention of one layer over all tokens, or
    the sampler over all rows. With stages, hidden states of the steps on their way come to that.
    """
    tokens, kv_width = max_num_batched_tokens, model.kv_heads * model.head_dim
    attention = 3 * model.heads * model.head_dim + 2 * kv_width + 2 * model.embed
    activations = tokens * dtype.itemsize * max(attention, 3 * model.ffn + model.embed)
    logits = _logits_bytes(model, tokens, max_num_seqs)
    waiting = 0 if num_stages == 1 else (num_stages + 2) * tokens * model.embed * dtype.itemsize
    return max(activations + logits, LOGIT_COPIES * logits) + waiting + LIBRARY_BYTES


def trial_bytes(
    model: ModelConfig, dtype: np.dtype, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """What XLA takes to try out the largest product where a program is compiled beside the pool."""
    size, tokens = dtype.itemsize, max_num_batched_tokens
    head = model.vocab * model.embed * size + _logits_bytes(model, tokens, max_num_seqs)
    gate_up = size * (2 * model.ffn * model.embed + tokens * (model.embed + 2 * model.ffn))
    return max(head, gate_up)


def _logits_bytes(model: ModelConfig, tokens: int, max_num_seqs: int) -> int:
    return max(max_num_seqs, min(MAX_SCORED_TOKENS, tokens)) * model.vocab * 4
