"""Every family on several devices, split or in stages, and every kind of work on two: as on one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from jaxpaged.config.settings import ParallelSettings
from jaxpaged.convert import convert
from jaxpaged.core.beams import BeamSearchParams
from jaxpaged.core.params import SamplingParams
from jaxpaged.sharding import make_placement
from jaxpaged.weights.loader import open_model
from tests.engine.test_schedule_invariance import SCHEDULES, Tally, compare, compare_schedules
from tests.engine.test_structured import answers, check, random_jobs
from tests.engine.test_verification import LIST, both, told
from tests.models.test_tensor_parallel import logits_on_mesh
from tests.support.checkpoints import write_variant
from tests.support.engines import TinyEngine, tiny_parts

pytestmark = pytest.mark.slow

WIDE = {"num_attention_heads": 8, "max_position_embeddings": 256, "num_hidden_layers": 4}
LAYERS = ["sliding_attention", "full_attention"] * 2
VARIANTS = {
    "llama": WIDE | {"num_key_value_heads": 8},
    "llama_linear_rope_biases": WIDE | {"num_key_value_heads": 4},
    "mistral_window": WIDE | {"num_key_value_heads": 2},
    "qwen2": WIDE | {"num_key_value_heads": 2, "vocab_size": 61},
    "qwen3": WIDE | {"num_key_value_heads": 4, "vocab_size": 61},
    "gemma2": WIDE | {"layer_types": LAYERS, "num_key_value_heads": 2, "vocab_size": 61},
    "gemma3": WIDE | {"layer_types": LAYERS, "num_key_value_heads": 1},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
JOBS = [
    ([(7 * i) % 61 for i in range(21)], GREEDY),
    ([(7 * i) % 61 for i in range(19)], replace(GREEDY, temperature=1.0, seed=3, top_k=20)),
    ([5, 60, 3], replace(GREEDY, repetition_penalty=1.3, logit_bias={60: 3.0, 2: -4.0})),
    ([9] * 7, replace(GREEDY, temperature=0.7, seed=4, top_p=0.8, min_p=0.02)),
]


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """Nothing here is slow but compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", params=VARIANTS)
def family(request, tmp_path_factory):
    """A model's folder, and what one device says."""
    name = request.param
    folder = write_variant(name, tmp_path_factory.mktemp(name), **VARIANTS[name])
    return folder, run(folder)


def run(folder, **sizes):
    engine = TinyEngine(tiny_parts(folder, skip_tokenizer_init=True, **sizes), token_budget=32)
    return engine.generate([prompt for prompt, _ in JOBS], [params for _, params in JOBS])


TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"


@pytest.mark.parametrize(
    "sizes",
    [{TENSOR: 2}, {TENSOR: 4}, {TENSOR: 8}, {PIPELINE: 2}, {PIPELINE: 4}],
    ids=lambda sizes: "".join(f"{name[0]}p{size}" for name, size in sizes.items()),
)
def test_a_family_on_several_devices_gives_the_tokens_of_one(family, sizes):
    folder, alone = family
    tally = Tally()
    found = run(folder, **sizes)
    for got, want in zip(found, alone, strict=True):
        compare(got, want, tally)
    assert not tally.close_calls
    assert tally.steps == sum(params.max_tokens for _, params in JOBS)


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with all its KV heads, with fewer
def test_written_for_eight_devices_it_has_the_same_logits_on_two(name, tmp_path):
    source = write_variant(name, tmp_path / "source", **VARIANTS[name])
    convert(source, tmp_path / "out", "auto", 8, {})
    logits = []
    for folder, num_devices in ((source, 2), (tmp_path / "out", 2), (tmp_path / "out", 4)):
        placement = make_placement(ParallelSettings(tensor_parallel_size=num_devices))
        loaded = open_model(folder, dtype=jnp.float32, placement=placement).load()
        parts = loaded.graphdef, loaded.params, loaded.config, placement
        found = logits_on_mesh(*parts, [5, 1, 60, 8])
        logits.append(found[:, : loaded.config.vocab])
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_allclose(logits[2], logits[1], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def parts_two(model_folder):
    return tiny_parts(model_folder / "R", tensor_parallel_size=2, swap_space=0.001)


@pytest.mark.timeout(600)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(**SCHEDULES)
def test_chunked_batched_preempted_on_two_devices_the_tokens_are_those_of_one(
    parts_two, parts_r, **schedule
):
    compare_schedules(parts_two, parts_r, **schedule)


def test_prompts_are_scored_on_a_mesh_as_on_one_device(parts_two, parts_r):
    params, prompt = replace(GREEDY, prompt_logprobs=3), [(7 * i) % 250 for i in range(50)]
    (got,), (want,) = (
        TinyEngine(parts).generate([prompt], [params]) for parts in (parts_two, parts_r)
    )
    for found, wanted in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert found.keys() == wanted.keys()
        for token, scored in wanted.items():
            assert abs(found[token].logprob - scored.logprob) < 1e-4
            assert found[token].rank == scored.rank


def test_guesses_on_a_mesh_change_nothing(model_folder, parts_s):
    parts = tiny_parts(model_folder / "S", tensor_parallel_size=2)
    for fields in ({"temperature": 0.0}, {"temperature": 0.5, "seed": 1}):
        params = SamplingParams(max_tokens=40, **fields)
        found, plain, drafts, _ = both(parts, [LIST], [params])
        assert len(drafts) > 2
        (alone,) = TinyEngine(parts_s).generate([LIST], [params])
        assert told(found[0]) == told(plain[0]) == told(alone)


def test_grammars_hold_answers_on_a_mesh_to_those_of_one_device(parts_two, parts_r):
    jobs = random_jobs(TinyEngine(parts_r), range(6))
    params = [one for _, one in jobs]
    alone, found = (answers(TinyEngine(parts), params) for parts in (parts_r, parts_two))
    for (schema, _), (got,), (want,) in zip(jobs, found, alone, strict=True):
        check(schema, got)
        assert got.token_ids == want.token_ids


def test_beams_on_a_mesh_are_those_of_one_device(parts_two, parts_r):
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    prompts = [[(7 * i) % 250 for i in range(13)], [9] * 16]
    found, alone = (
        TinyEngine(parts).llm.beam_search(prompts, params) for parts in (parts_two, parts_r)
    )
    for got, want in zip(found, alone, strict=True):
        assert [s.tokens for s in got.sequences] == [s.tokens for s in want.sequences]
