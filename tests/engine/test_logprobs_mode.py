"""--logprobs-mode: what the sampling program tells of its rows, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.buckets import Bucket
from jaxpaged.core.packing import PackedLayout
from jaxpaged.engine.step import STEP_WORDS, TOP_WORDS, SamplerState, make_sample

VOCAB, ROWS = 64, 2
LOGITS = np.random.default_rng(0).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)


def told(mode: str, sampler: str):
    """Of each sampled row: the token, its value, the best ids and their values."""
    bucket = Bucket("decode" if sampler == "full" else "mixed", sampler, 2, ROWS)
    layout = PackedLayout(bucket, 1, VOCAB)
    batch, views = layout.new_batch()
    views["temperature"][:] = [2.0, 0.0]
    views["top_k"][:] = [2, 0]
    for name in ("top_p", "repetition_penalty"):
        views[name][:] = 1
    views["told_ids"][:, 0] = -1
    views["bias_ids"][:] = VOCAB
    views["bias_ids"][1, 0], views["bias_values"][1, 0] = LOGITS[1].argmax(), -50.0
    if sampler == "scored":
        views["sample_rows"][:], views["targets"][:] = [1, 0], -1
    logits = LOGITS if sampler == "full" else LOGITS[::-1].copy()
    state = SamplerState(jnp.zeros(3, jnp.int32), jnp.zeros((3, VOCAB), jnp.int16))
    sample = jax.jit(make_sample(layout, (), mode))
    words = np.asarray(sample(state, jnp.asarray(logits), jnp.asarray(batch.sample))[1])
    tokens = words[: ROWS * STEP_WORDS].reshape(ROWS, STEP_WORDS)[:, 0]
    top = words[ROWS * STEP_WORDS :].reshape(-1, TOP_WORDS)
    top = top if sampler == "full" else top[::-1]
    return tokens, top[:, 0].copy().view(np.float32), top[:, 2:22], top[:, 22:].copy().view("f4")


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("mode", "sampler"),
    [("raw_logits", "full"), ("processed_logprobs", "full"), ("processed_logits", "scored")],
)
def test_raw_is_the_model_and_processed_what_was_sampled_from(mode, sampler):
    edited = LOGITS.copy()
    edited[1, LOGITS[1].argmax()] -= 50
    edited[0] /= 2
    edited[0, np.argsort(edited[0])[:-2]] = -np.inf
    logits = LOGITS if mode == "raw_logits" else edited
    want = log_softmax(logits) if mode.endswith("logprobs") else logits
    tokens, values, ids, top = told(mode, sampler)
    assert tokens[1] == edited[1].argmax()
    np.testing.assert_allclose(values, want[[0, 1], tokens], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(top[:, :2], np.sort(want)[:, :-3:-1], rtol=1e-4, atol=1e-4)
    assert ids[1, 0] == want[1].argmax()
