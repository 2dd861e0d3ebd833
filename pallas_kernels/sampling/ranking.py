"""The best tokens of a vocabulary, and the place of a given one among them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.checks import KernelArgumentError

_BLOCK = 128


def top_n_logprobs(
    logits: Float[Array, "rows vocab"], n: int = 20
) -> tuple[Int32[Array, "rows n"], Float[Array, "rows n"]]:
    """The ids and log-probabilities of the `n` best tokens, best first; of equals, the lower id.

    Only the `n` blocks of the vocabulary with the best first token can hold one of the `n` best,
    so only these are sorted.

    Args:
        logits: float32.
        n: 1 to the vocabulary's size. Static.

    Raises:
        KernelArgumentError: `n` out of range, or another type; while tracing.
    """
    vocab = checks.check_shapes("top_n_logprobs", {"logits": (logits, ("rows", "vocab"))})["vocab"]
    checks.check_dtype("top_n_logprobs", "logits", logits, ("float32",))
    if not 1 <= n <= vocab:
        raise KernelArgumentError(
            f"top_n_logprobs: n is {n}, allowed: 1 to the vocabulary's {vocab}"
        )

    # one zero, not two, so that equals are equal to top_k as well
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    blocks = jnp.where(padded == 0, 0, padded).reshape(logits.shape[0], -1, _BLOCK)
    best_of_block = jnp.max(blocks, axis=2)
    num_blocks = min(n, blocks.shape[1])
    _, block_ids = lax.top_k(best_of_block, num_blocks)
    block_ids = jnp.sort(block_ids, axis=1)  # in the order of ids, which decides between equals
    candidates = jnp.take_along_axis(blocks, block_ids[:, :, None], axis=1)
    top_logits, places = lax.top_k(candidates.reshape(logits.shape[0], -1), n)
    top_ids = jnp.take_along_axis(block_ids, places // _BLOCK, axis=1) * _BLOCK + places % _BLOCK
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    return top_ids, top_logits - total


def rank_of(
    logits: Float[Array, "rows vocab"], token_ids: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """The place of each row's token in the order of `top_n_logprobs`, from 1."""
    vocab = checks.check_shapes(
        "rank_of", {"logits": (logits, ("rows", "vocab")), "token_ids": (token_ids, ("rows",))}
    )["vocab"]
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    goes_before = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    return 1 + jnp.sum(goes_before, axis=1, dtype=jnp.int32)
