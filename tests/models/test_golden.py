"""Every family against transformers, through the loader and the page pool."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.weights.loader import load_model
from tests.support.checkpoints import golden_cases, golden_logits, tiny_tensors, write_checkpoint
from tests.support.decoding import logits_of

CASES = golden_cases()
DECODED = ("llama", "llama_dynamic_rope", "mistral_window", "gemma3")  # decode steps at the end


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_whatever_the_chunks(name, tmp_path):
    case = CASES[name]
    write_checkpoint(tmp_path, case["config"], tiny_tensors(case))
    model = load_model(tmp_path, dtype=jnp.float32)
    chunks = [9, 11, 1, 1, 2] if name in DECODED else [9, 15]
    logits = logits_of(model.graphdef, model.params, model.config, case["token_ids"], chunks)
    np.testing.assert_allclose(logits, golden_logits(name), rtol=0, atol=1e-4)


def test_logits_in_bfloat16_stay_near_the_exact_ones(tmp_path):
    case = CASES["qwen3"]
    write_checkpoint(tmp_path, case["config"], tiny_tensors(case))
    model = load_model(tmp_path, dtype=jnp.bfloat16)
    ids, chunks = case["token_ids"], [20, 4]
    logits = logits_of(model.graphdef, model.params, model.config, ids, chunks, jnp.bfloat16)
    assert logits.dtype == np.float32
    exact = golden_logits("qwen3")
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()
