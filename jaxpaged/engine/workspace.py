"""What a step needs while it runs, estimated before anything is compiled."""

from collections.abc import Sequence

import numpy as np

from jaxpaged.config.architecture import ModelConfig
from jaxpaged.core.buckets import MAX_SCORED_TOKENS
from pallas_kernels.tuning import MAX_EMPTY_ROWS, PRODUCT_ROWS, supports_gated_product

# float32 logits of the sampled rows that a sampler holds beside those it is given, as compiled for
# Hopper: with edits, and without; where a kernel finds what filters keep, and where XLA searches
BY_KERNEL, BY_SEARCH = (2, 0), (4, 3)
LIBRARY_BYTES = 64 * 2**20  # workspace of the matrix products' library


def workspace_bytes(
    model: ModelConfig,
    dtype: np.dtype,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_stages: int = 1,
    *,
    num_draft_tokens: int = 0,
    searches_by_kernel: bool = False,
    gates_in_product: bool = False,
    other_sizes: Sequence[int] = (),
) -> int:
    """What a step needs beside weights, pool and slots: activations and logits.

    The largest moment counts: the feed-forward or the attention of one layer, and the logits which
    that leads to; or the sampler over them. A step that scores a prompt or checks drafts has few
    tokens, but logits of all. With stages, hidden states of the steps on their way come to that.
    `other_sizes` are tokens of steps that the operator has named.
    """
    tokens, row = max_num_batched_tokens, 4 * model.vocab
    kv_width = model.kv_heads * model.head_dim
    attention = 3 * model.heads * model.head_dim + 2 * kv_width + 2 * model.embed

    def activations(num_tokens: int) -> int:
        sizes = {"ffn": model.ffn, "embed": model.embed, "activation": model.activation}
        by_kernel = gates_in_product and not model.mlp_bias
        by_kernel = by_kernel and supports_gated_product(num_tokens, dtype=dtype, **sizes)
        gate = (1 if by_kernel else 3) * model.ffn + model.embed
        return num_tokens * dtype.itemsize * max(attention, gate)

    # what the kernel does not take may need more than the largest step, which it takes
    few = range(8, int(PRODUCT_ROWS / MAX_EMPTY_ROWS), 8)
    others = [num for num in (*other_sizes, *few) if num < tokens]
    edited, plain = BY_KERNEL if searches_by_kernel else BY_SEARCH
    scored = min(MAX_SCORED_TOKENS, tokens)
    steps = [  # activations, logits, sampled rows, copies of a sampled row's logits
        (max(map(activations, (tokens, *others))), max_num_seqs, max_num_seqs, edited),
        (activations(scored), scored, min(max_num_seqs, scored), edited),
        (activations(num_draft_tokens), num_draft_tokens, num_draft_tokens, plain),
    ]
    largest = max(
        [
            logits * row + max(activated, copies * sampled * row)
            for activated, logits, sampled, copies in steps
        ]
    )
    waiting = 0 if num_stages == 1 else (num_stages + 2) * tokens * model.embed * dtype.itemsize
    return largest + waiting + LIBRARY_BYTES


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
