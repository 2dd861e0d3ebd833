"""The best tokens of a vocabulary, and the place of a given one among them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.checks import KernelArgumentError
from pallas_kernels.sampling.shards import log_sum_exp, logit_of, num_parts, sum_over

_BLOCK = 128


def top_n_logprobs(
    logits: Float[Array, "rows vocab"], n: int = 20, *, axis: str | None = None
) -> tuple[Int32[Array, "rows n"], Float[Array, "rows n"]]:
    """The ids and log-probabilities of the `n` best tokens, best first; of equals, the lower id.

    Only the `n` blocks of the vocabulary with the best first token can hold one of the `n` best,
    so only these are sorted.

    Args:
        logits: float32.
        n: 1 to the vocabulary's size. Static.
        axis: inside `jax.shard_map`, the mesh axis over which the vocabulary is split. Each device
            then gets the best of all, in two exchanges of 4 bytes a token kept on any device.

    Raises:
        KernelArgumentError: `n` out of range, or another type; while tracing.
    """
    vocab = checks.check_shapes("top_n_logprobs", {"logits": (logits, ("rows", "vocab"))})["vocab"]
    vocab *= num_parts(axis)
    checks.check_dtype("top_n_logprobs", "logits", logits, ("float32",))
    if not 1 <= n <= vocab:
        raise KernelArgumentError(
            f"top_n_logprobs: n is {n}, allowed: 1 to the vocabulary's {vocab}"
        )

    top_ids, top_logits = _top_n(logits, min(n, logits.shape[1]))
    if axis is not None:
        top_ids, top_logits = _best_of_all(top_ids, top_logits, n, logits.shape[1], axis)
    return top_ids, top_logits - log_sum_exp(logits, axis)[:, None]


def _top_n(
    logits: Float[Array, "rows vocab"], n: int
) -> tuple[Int32[Array, "rows n"], Float[Array, "rows n"]]:
    vocab = logits.shape[1]
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
    return top_ids, top_logits


def _best_of_all(
    ids: Int32[Array, "rows n"], logits: Float[Array, "rows n"], n: int, part: int, axis: str
) -> tuple[Int32[Array, "rows best"], Float[Array, "rows best"]]:
    """The best `n` of every device's best; a device holds `part` of the vocabulary."""
    width, index = logits.shape[1], lax.axis_index(axis)
    # in the order of devices, so that of equals the lower id comes first here too
    everyone = lax.all_gather(logits, axis, axis=1, tiled=True)
    best, places = lax.top_k(everyone, n)
    own = jnp.take_along_axis(ids, places % width, axis=1) + index * part
    return lax.psum(jnp.where(places // width == index, own, 0), axis), best


def rank_of(
    logits: Float[Array, "rows vocab"],
    token_ids: Int32[Array, " rows"],
    *,
    axis: str | None = None,
) -> Int32[Array, " rows"]:
    """The place of each row's token in the order of `top_n_logprobs`, from 1."""
    vocab = checks.check_shapes(
        "rank_of", {"logits": (logits, ("rows", "vocab")), "token_ids": (token_ids, ("rows",))}
    )["vocab"]
    chosen = logit_of(logits, token_ids, axis)[:, None]
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    if axis is not None:
        ids += lax.axis_index(axis) * vocab
    goes_before = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    return 1 + sum_over(jnp.sum(goes_before, axis=1, dtype=jnp.int32), axis)
