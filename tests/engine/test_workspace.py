"""The planner's estimate of what a step needs, against what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.config.speculation import Speculation
from jaxpaged.engine.capacity import plan_memory
from jaxpaged.engine.memory import named_device
from jaxpaged.engine.workspace import BY_KERNEL, BY_SEARCH, LIBRARY_BYTES, workspace_bytes
from jaxpaged.models.registry import model_config

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
BF16 = np.dtype(jnp.bfloat16)
# `benchmarks.planner_check` on an H200: MB of weights, and of the whole at its peak without pages;
# less what the compiled programs hold less since the gated product is one kernel
MEASURED = [
    ("llama3-8b", 8192, 256, 16061.1, 17043.7 - 469.8),
    ("llama3-8b", 2048, 64, 16061.1, 16306.3),
    ("qwen2.5-7b", 16_384, 512, 15231.6, 17700.2 - 1241.5),
    ("qwen2.5-0.5b", 8192, 256, 988.2, 1567.3),
    ("qwen2.5-0.5b", 1024, 32, 988.2, 1193.9),
    ("llama2-13b", 4096, 128, 26032.6, 26457.7 - 88.0),
]


def shape(name):
    return model_config(json.loads((CONFIGS / name / "config.json").read_text()), name)


@pytest.mark.parametrize(("name", "tokens", "rows", "weights_mb", "measured_mb"), MEASURED)
def test_the_plan_is_near_what_was_measured_and_never_below(
    name, tokens, rows, weights_mb, measured_mb
):
    config = config_from_keywords(
        model=name, max_num_batched_tokens=tokens, max_num_seqs=rows, max_model_len=4096
    )
    plan = plan_memory(config, shape(name), int(1e6 * weights_mb), BF16, named_device("H200"))
    predicted_mb = (plan.weights + plan.slots + plan.workspace) / 1e6
    assert 0 <= predicted_mb - measured_mb < 130


def test_small_steps_need_the_logits_of_a_scored_prompt_and_copies_of_the_sampled_rows():
    model, row = shape("qwen2.5-0.5b"), 4 * 151_936
    for by_kernel, (copies, _) in ((True, BY_KERNEL), (False, BY_SEARCH)):
        found = workspace_bytes(model, BF16, 1024, 32, searches_by_kernel=by_kernel)
        assert found == 256 * row + copies * 32 * row + LIBRARY_BYTES


def test_steps_with_drafts_have_logits_of_all_their_tokens():
    tokens = Speculation("ngram", 5).most_tokens(max_num_seqs=64, max_num_batched_tokens=8192)
    assert tokens == 192
    model = replace(shape("qwen2.5-0.5b"), embed=64, ffn=64)
    plain, drafting = (
        workspace_bytes(model, BF16, 8, 8, num_draft_tokens=count) for count in (0, tokens)
    )
    assert drafting - LIBRARY_BYTES == (1 + BY_SEARCH[1]) * tokens * 4 * model.vocab
    assert plain < drafting


def test_a_size_that_the_gated_product_does_not_take_may_need_more_than_the_largest():
    model = shape("llama3-8b")
    sizes = {"gates_in_product": True, "searches_by_kernel": True}
    usual = workspace_bytes(model, BF16, 8192, 1, **sizes)
    odd = workspace_bytes(model, BF16, 8192, 1, other_sizes=(8001, 8200), **sizes)
    assert odd - usual > 8001 * 2 * model.ffn
    model = replace(model, vocab=1024)
    # 416 tokens fill tiles of 128 rows well enough, 408 do not
    small = [workspace_bytes(model, BF16, tokens, 1, **sizes) for tokens in (400, 408, 416)]
    assert 0 < small[1] - small[0] < 8 * 2 * 4 * model.ffn
    assert 0 <= small[2] - small[1] < 8 * 2 * model.ffn
