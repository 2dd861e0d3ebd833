"""An engine on four devices, each with a copy of one of two KV heads: all that one device does."""

from dataclasses import replace

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.control import EngineControl
from tests.engine.test_schedule_invariance import Tally, compare
from tests.support.engines import TinyEngine, tiny_parts
from tests.support.models import byte_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
SHARED = byte_ids("a first page")
JOBS = [
    (SHARED, GREEDY),
    ([7, 8, 9] * 4, replace(GREEDY, temperature=1.0, seed=7, top_k=40, top_p=0.9, min_p=0.01)),
    ([*SHARED, 4], replace(GREEDY, allowed_token_ids=[3, 130, 260, 400, 511], n=2)),
    ([*SHARED, 3], replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5)),
    ([100, 50] * 6, replace(GREEDY, logit_bias={3: 4.0, 400: 4.0, 511: 4.0}, seed=1)),
]


@pytest.fixture(scope="module")
def parts_mesh(model_folder):
    return tiny_parts(model_folder / "R", tensor_parallel_size=4, swap_space=0.001)


def test_crowded_on_a_mesh_or_alone_on_one_device_the_tokens_are_the_same(parts_r, parts_mesh):
    prompts, params = [job[0] for job in JOBS], [job[1] for job in JOBS]
    crowd = TinyEngine(
        parts_mesh, num_pages=6, token_budget=17, preemption_mode="swap", num_host_pages=8
    )
    together = crowd.generate(prompts, params)
    tally = Tally()
    for prompt, one, got in zip(prompts, params, together, strict=True):
        alone = TinyEngine(parts_r).generate([prompt], [one])[0]
        compare(got, alone, tally)
        assert ranks_of(got.outputs[0]) == ranks_of(alone.outputs[0])
    assert len(tally.close_calls) <= 1
    assert crowd.scheduler.num_preemptions > 0


def ranks_of(answer):
    """Of the sampled and the likeliest tokens, at the first step: later ones may be close calls."""
    return {token: found.rank for token, found in answer.logprobs[0].items()}


def test_the_mesh_wakes_with_the_weights_that_it_went_to_sleep_with(parts_mesh):
    engine = TinyEngine(parts_mesh, poison=False, num_scheduler_steps=3)
    control = EngineControl(replace(parts_mesh, engine=engine.engine))
    before = engine.generate([SHARED], [GREEDY])[0].outputs[0].token_ids
    for level in (1, 2):
        control.sleep(level)
        control.wake_up()
        assert engine.generate([SHARED], [GREEDY])[0].outputs[0].token_ids == before
    pages = parts_mesh.engine.runner.state.kv_pages[0].k
    assert len(pages.sharding.device_set) == 4
