"""A draft model beside the model: whatever it guesses, the answers stay."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.repetition import RepetitionDetectionParams
from jaxpaged.errors import ConfigError
from jaxpaged.weights.loader import DRAFT
from tests.support.engines import TinyEngine, tiny_parts

pytestmark = pytest.mark.usefixtures("steady_pace")
RANDOM = np.random.default_rng(8)
PROMPTS = [RANDOM.integers(0, 255, length).tolist() for length in (5, 30, 17)]
GREEDY = {"temperature": 0.0}
LADDER = BucketLadder(
    [
        Bucket("decode", "sampled", 4, 4),
        Bucket("mixed", "sampled", 256, 4),
        Bucket("draft", "greedy", 16, 4),
        Bucket("draft", "sampled", 16, 4),
    ]
)


@pytest.fixture(scope="module")
def parts(model_folder):
    """Model R, guessed for by model R itself."""
    config = {"model": str(model_folder / "R"), "num_speculative_tokens": 3}
    return tiny_parts(model_folder / "R", speculative_config=config)


@pytest.fixture
def stranger(parts):
    """Another draft model of the same shapes for one test."""
    runner, random = parts.engine.runner, np.random.default_rng(0)
    before = runner.all_params

    def other(x):
        return jax.device_put(random.normal(0, 1 / 8, x.shape).astype(x.dtype), x.sharding)

    runner.update_params(before | {DRAFT: jax.tree.map(other, before[DRAFT])})
    yield
    runner.update_params(before)


def guessing(parts, **fields):
    speculation = Speculation("draft_model", 3, model="R")
    engine = TinyEngine(parts, speculation=speculation, ladder=LADDER, **fields)
    engine.engine.metrics.enable_speculation(3)
    return engine


def run(parts, fields, prompts=PROMPTS, max_tokens=40, **engine_fields):
    """Outputs with guesses and without; drafts by name as counted."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
    plain = TinyEngine(parts, ladder=LADDER).generate(prompts, [params] * len(prompts))
    engine = guessing(parts, **engine_fields)
    found = engine.generate(prompts, [params] * len(prompts))
    return found, plain, counted(engine), engine


def counted(engine):
    text = engine.engine.metrics.text().decode()
    lines = [line.split() for line in text.splitlines() if line.startswith("vllm:spec_decode")]
    names = {"drafts": "drafts", "guessed": "draft_tokens", "right": "accepted_tokens"}
    return {
        name: next(float(n) for key, n in lines if key.startswith(f"vllm:spec_decode_num_{long}_t"))
        for name, long in names.items()
    }


def same(found, plain):
    return [a.outputs[0].token_ids for a in found] == [b.outputs[0].token_ids for b in plain]


def test_the_same_model_guesses_all_but_nothing_changes(parts):
    found, plain, counts, _ = run(parts, GREEDY)
    assert same(found, plain)
    assert counts["drafts"] > 20
    assert counts["right"] >= 0.98 * counts["guessed"]


@pytest.mark.usefixtures("stranger")
def test_a_model_that_guesses_wrong_changes_nothing_and_is_asked_less(parts):
    found, plain, counts, _ = run(parts, GREEDY, max_tokens=60)
    assert same(found, plain)
    assert counts["drafts"] > 2
    assert counts["right"] < 0.2 * counts["guessed"]
    assert counts["guessed"] < 60


def test_sampled_answers_are_those_without_guesses(parts):
    found, plain, counts, _ = run(parts, {"temperature": 0.7, "top_p": 0.9, "seed": 3})
    assert same(found, plain)
    assert 0 < counts["right"] < counts["guessed"]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_repetition_among_guessed_tokens_ends_the_answer_where_it_is(parts, count):
    wanted = RepetitionDetectionParams(max_pattern_size=8, min_count=count)
    found, plain, counts, _ = run(parts, GREEDY | {"repetition_detection": wanted}, max_tokens=60)
    told = [output.outputs[0] for output in found]
    alone = [output.outputs[0] for output in plain]
    assert [(a.token_ids, a.text, a.finish_reason) for a in told] == [
        (a.token_ids, a.text, a.finish_reason) for a in alone
    ]
    assert [a.cumulative_logprob for a in told] == pytest.approx(
        [a.cumulative_logprob for a in alone], rel=1e-4
    )
    assert "repetition" in {a.finish_reason for a in told}
    assert counts["right"] > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_sequences_are_guessed_for_again(parts, mode):
    fields = {"num_pages": 1 + 9, "preemption_mode": mode, "num_host_pages": 64}
    found, plain, counts, engine = run(parts, GREEDY, max_tokens=60, **fields)
    assert same(found, plain)
    assert engine.scheduler.num_preemptions
    assert (engine.scheduler.tier.num_swaps > 0) == (mode == "swap")
    # its KV was shared, swapped or computed again with the model's
    assert counts["right"] >= 0.9 * counts["guessed"]


def test_a_prefix_hit_holds_for_the_draft_model_too(parts):
    prompt = RANDOM.integers(0, 255, 65).tolist()
    engine = guessing(parts)
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY)]
    cold, warm = (engine.generate([prompt], params)[0] for _ in range(2))
    assert warm.num_cached_tokens == 64
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    counts = counted(engine)
    assert counts["right"] >= 0.98 * counts["guessed"]


def test_its_pages_and_weights_are_planned(parts):
    plan, state = parts.plan, parts.engine.runner.state
    assert plan.draft_page == plan.page - plan.draft_page
    assert (
        sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv_pages)) == plan.num_pages * plan.page
    )
    assert plan.weights >= 2 * sum(x.nbytes for x in jax.tree.leaves(parts.engine.runner.params))


def test_another_vocabulary_is_refused(model_folder, tmp_path):
    config = json.loads((model_folder / "R" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    spec = {"model": str(tmp_path), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="has a vocabulary of 500 tokens, the model one of 512"):
        tiny_parts(model_folder / "R", speculative_config=spec, load_format="dummy")


def test_weights_of_both_can_be_taken_away_and_put_back(parts):
    from jaxpaged.engine.control import EngineControl

    control, runner = EngineControl(parts), parts.engine.runner
    before = jax.tree.map(np.asarray, runner.all_params)
    control.sleep(1)
    control.wake_up()
    after = jax.tree.map(np.asarray, runner.all_params)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert jnp.all(runner.state.kv_pages[-1].k == 0)
