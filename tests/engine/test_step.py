"""The sampling programs beside each other."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.packing import PackedLayout
from jaxpaged.engine.step import STEP_WORDS, SamplerState, make_sample

VOCAB, ROWS = 96, 8
LOGITS = np.random.default_rng(0).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
BEST = LOGITS.argmax(axis=1)


def step_words(sampler, is_edited=True):
    layout = PackedLayout(Bucket("decode", sampler, ROWS, ROWS), 1, VOCAB)
    batch, views = layout.new_batch()
    views["temperature"][:] = [0, 0, 0, 0, 1, 1, 0.5, 2]
    views["top_p"][:] = 0.9
    views["seed"][:] = np.arange(2 * ROWS).reshape(ROWS, 2)
    if "repetition_penalty" in views:
        views["repetition_penalty"][:] = 1
        views["told_ids"][:, 0] = -1
    if is_edited:
        for row in (0, 4):  # banned by the mask
            views["banned"][row, BEST[row] // 32] = 1 << BEST[row] % 32
        for row in (1, 5):  # by a bias
            views["bias_ids"][row, 0], views["bias_values"][row, 0] = BEST[row], -np.inf
        views["bias_ids"][2, 0], views["bias_values"][2, 0] = 7, 100.0
    state = SamplerState(jnp.zeros(ROWS + 1, jnp.int32), jnp.zeros((ROWS + 1, VOCAB), jnp.int16))
    sample = jax.jit(make_sample(layout, ()))
    words = np.asarray(sample(state, jnp.asarray(LOGITS), jnp.asarray(batch.sample))[1])
    return words[: ROWS * STEP_WORDS].reshape(ROWS, STEP_WORDS)


def test_bans_and_biases_alone_give_the_same_tokens_as_the_full_sampler():
    masked, full = step_words("masked"), step_words("full")
    np.testing.assert_array_equal(masked, full)
    assert all(masked[row, 0] != BEST[row] for row in (0, 1, 4, 5))
    assert masked[2, 0] == 7
    assert masked[3, 0] == BEST[3]


def test_without_any_they_are_those_of_the_plain_sampler():
    np.testing.assert_array_equal(step_words("masked", False), step_words("sampled", False))
