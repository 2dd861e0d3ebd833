"""A model cut into stages on devices of their own: the tokens of one device, whatever the cut."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxpaged.core.buckets import Bucket, BucketLadder
from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.control import EngineControl
from jaxpaged.errors import ConfigError
from tests.engine.test_mesh import GREEDY, JOBS, SHARED
from tests.engine.test_schedule_invariance import Tally, compare
from tests.support.engines import TinyEngine, tiny_parts
from tests.support.models import write_random

# so that little is compiled
ONE_SIZE = BucketLadder([Bucket("mixed", "full", 32, 4)])
ONE_GREEDY_SIZE = BucketLadder([Bucket("mixed", "greedy", 32, 4)])


TWICE = SHARED, replace(GREEDY, n=2)


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """Model R with five layers and tied embeddings."""
    folder = tmp_path_factory.mktemp("five")
    write_random(folder, num_layers=5, is_tied=True)
    return folder


@pytest.fixture(scope="module")
def parts_five(five):
    return tiny_parts(five)


@pytest.fixture(scope="module")
def parts_tp2_pp2(model_folder):
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return tiny_parts(model_folder / "R", **sizes, swap_space=0.001)


@pytest.mark.parametrize(("num_stages", "layers"), [(2, [3, 2]), (4, [2, 1, 1, 1])])
def test_stages_of_a_tied_model_that_they_do_not_divide(five, parts_five, num_stages, layers):
    parts = tiny_parts(five, pipeline_parallel_size=num_stages)
    places = [pages.k.sharding.device_set for pages in parts.engine.runner.state.kv_pages]
    assert list(Counter(map(frozenset, places)).values()) == layers
    engine = TinyEngine(parts, ladder=ONE_GREEDY_SIZE, token_budget=20)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, length).tolist() for length in (9, 4, 23, 6, 1)]
    params = [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)] * 5
    waits = watch_waits(engine)
    got = engine.generate(prompts, params)
    alone = TinyEngine(parts_five, ladder=ONE_GREEDY_SIZE, token_budget=32)
    for one, want in zip(got, alone.generate(prompts, params), strict=True):
        assert one.outputs[0].token_ids == want.outputs[0].token_ids
    # between a step and the one whose tokens it waits for, the other stages have theirs
    assert Counter(waits).most_common(1)[0][0] == num_stages


def watch_waits(engine):
    """How many steps before a step the one is whose tokens the first stage waits for."""
    stages, waits = engine.engine.runner._earlier, []
    choose = stages._needed_step

    def spy(batch):
        needed = choose(batch)
        if needed:
            waits.append(1 + stages._num_steps - needed)
        return needed

    stages._needed_step = spy
    return waits


def test_crowded_on_two_stages_of_two_devices_the_tokens_are_those_of_one(parts_r, parts_tp2_pp2):
    crowd = TinyEngine(
        parts_tp2_pp2,
        num_pages=6,
        token_budget=17,
        preemption_mode="swap",
        num_host_pages=8,
        ladder=ONE_SIZE,
    )
    calm = TinyEngine(parts_tp2_pp2, token_budget=32, ladder=ONE_SIZE)
    copies, tally = [], Tally()
    together = crowd.generate([job[0] for job in JOBS], [job[1] for job in JOBS])
    together += calm.generate(
        *zip(TWICE, strict=True), lambda plan: copies.extend(plan.page_copies)
    )
    for (prompt, one), got in zip([*JOBS, TWICE], together, strict=True):
        engine = TinyEngine(parts_r, token_budget=32, ladder=ONE_SIZE)
        compare(got, engine.generate([prompt], [one])[0], tally)
        assert got.outputs[-1].token_ids == got.outputs[0].token_ids or one.temperature
    assert len(tally.close_calls) <= 1
    assert crowd.scheduler.tier.num_swaps > 0
    assert copies


def test_stages_wake_with_the_weights_that_they_went_to_sleep_with(parts_tp2_pp2):
    engine = TinyEngine(parts_tp2_pp2, poison=False, token_budget=32, ladder=ONE_SIZE)
    control = EngineControl(replace(parts_tp2_pp2, engine=engine.engine))
    before = engine.generate([SHARED], [GREEDY])[0].outputs[0].token_ids
    for level in (1, 2):
        control.sleep(level)
        control.wake_up()
        assert engine.generate([SHARED], [GREEDY])[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 3}, "is 3, over the model's 2 layers: lower it"),
        ({"num_scheduler_steps": 2}, "--num-scheduler-steps is 2: .* leave out one"),
    ],
)
def test_what_stages_cannot_do_is_refused(model_folder, settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny_parts(model_folder / "R", **{"pipeline_parallel_size": 2} | settings)
