"""Several decode steps in one dispatch give the tokens of one at a time."""

import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.engine.opening import ladder_of
from tests.support.engines import TinyEngine, tiny_parts

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def generate(parts, params, **settings):
    """Answers, and the number of steps of each dispatch."""
    tiny, sizes = TinyEngine(parts, **settings), list[int]()
    runner = tiny.parts.engine.runner
    dispatch, dispatch_chain = runner.dispatch, runner.dispatch_chain

    def count_one(batch):
        sizes.append(1)
        return dispatch(batch)

    def count_chain(batches):
        sizes.append(len(batches))
        return dispatch_chain(batches)

    runner.dispatch, runner.dispatch_chain = count_one, count_chain
    try:
        outputs = tiny.generate(PROMPTS[: len(params)], params)
    finally:
        del runner.dispatch, runner.dispatch_chain
    return [output.outputs[0] for output in outputs], sizes


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.4},
    ],
    ids=["greedy", "sampled", "penalties"],
)
def test_answers_are_those_of_single_steps_and_end_where_those_end(parts_r, options):
    plain = SamplingParams(max_tokens=23, ignore_eos=True, logprobs=1, **options)
    (alone, *_), _ = generate(parts_r, [plain])
    stops = SamplingParams(
        max_tokens=23, logprobs=1, stop_token_ids=[alone.token_ids[9]], **options
    )
    for params in ([plain], [plain, stops, plain]):
        wanted, _ = generate(parts_r, params)
        got, sizes = generate(parts_r, params, num_scheduler_steps=4)
        assert sizes.count(4) >= 3
        for a, b in zip(got, wanted, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert [set(p) for p in a.logprobs or ()] == [set(p) for p in b.logprobs or ()]


def test_while_somebody_waits_each_step_is_its_own(parts_r):
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 3
    _, sizes = generate(parts_r, params, num_pages=1 + 2, num_scheduler_steps=4)
    assert sizes[:30] == [1] * 30
    assert 4 in sizes[30:]  # the last request, when nobody waits any more


def test_chunks_are_cut_to_the_sizes_of_steps_unless_a_program_takes_several(model_folder, parts_r):
    sizes = ladder_of(parts_r.config).step_sizes()
    assert parts_r.engine.scheduler.limits.step_sizes == sizes
    assert len(sizes) > 1
    several = tiny_parts(model_folder / "R", num_scheduler_steps=2).engine
    assert several.scheduler.limits.step_sizes == ()
