"""The last prompt chunk of a step is cut to a padded size, where its caller waits for the end."""

import random

import pytest

from benchmarks.schedule_simulation import Simulation, make_request
from jaxpaged.core.buckets import default_ladder
from jaxpaged.core.filling import filled
from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.recording import RecordedScheduler, replay
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import SeqState
from jaxpaged.errors import ConfigError
from tests.core.fake_device import (
    Loop,
    add,
    commit,
    generate_alone,
    make_limits,
    make_scheduler,
    make_sequence,
    outcome,
    prompt,
    shares,
)

SIZES = (4, 8, 16)


def waiting_for_end(seq_id, tokens, max_tokens=4, **params):
    fields = {"temperature": 0.0, "output_kind": OutputKind.FINAL_ONLY}
    params = SamplingParams(max_tokens=max_tokens, **fields | params)
    return make_sequence(seq_id, tokens, max_tokens, params=params)


def planned(scheduler, *seqs):
    add(scheduler, *seqs)
    plan = scheduler.schedule()
    scheduler.check()
    return plan


@pytest.mark.parametrize(
    ("before", "q_len", "kept"),
    [
        (100, 40, 28),  # 12 put off save 116 of padding
        (100, 28, 28),  # a size already
        (100, 70, 28),  # 42 and 86
        (100, 113, 28),  # 85 and 43: just over half
        (100, 114, 114),  # 86 and 42
        (127, 5, 1),
        (128, 5, 5),  # nothing would be left
        (200, 5, 5),
        (10, 20, 20),  # below the smallest size
        (300, 20, 20),  # above the largest
        (0, 140, 140),  # a row without others
    ],
)
def test_a_row_is_cut_where_the_padding_saved_outweighs_what_is_put_off(before, q_len, kept):
    assert filled(before, q_len, (64, 128, 256)) == kept
    assert filled(before, q_len, ()) == q_len


def test_the_last_prompt_of_a_step_is_cut_and_goes_on_in_the_next():
    scheduler = make_scheduler(step_sizes=SIZES)
    first, last = waiting_for_end(0, prompt(0, 5)), waiting_for_end(1, prompt(10, 4))
    plan = planned(scheduler, first, last)
    assert shares(plan) == [(0, 0, 5), (1, 0, 3)]
    assert plan.columns.samples == [True, False]
    assert (last.num_computed_tokens, last.num_in_flight, last.num_registered_pages) == (3, 0, 0)
    following = scheduler.schedule()
    assert shares(following) == [(0, 5, 1), (1, 3, 1)]
    assert following.columns.samples == [True, True]
    assert commit(scheduler, plan) == [first]
    assert commit(scheduler, following) == [first, last]
    scheduler.check()


def test_of_a_request_for_its_prompt_alone_all_is_computed():
    scheduler = make_scheduler(step_sizes=SIZES)
    last = waiting_for_end(1, prompt(10, 4), max_tokens=0)
    plan = planned(scheduler, waiting_for_end(0, prompt(0, 5)), last)
    assert shares(plan)[1] == (1, 0, 3)
    following = scheduler.schedule()
    commit(scheduler, plan)
    assert last.state is SeqState.RUNNING
    commit(scheduler, following)
    assert (last.state, last.num_computed_tokens) == (SeqState.FINISHED, 4)


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
def test_a_prompt_whose_caller_is_told_every_token_stays_whole(kind):
    scheduler = make_scheduler(step_sizes=SIZES)
    last = waiting_for_end(1, prompt(10, 4), output_kind=kind)
    plan = planned(scheduler, waiting_for_end(0, prompt(0, 5)), last)
    assert shares(plan) == [(0, 0, 5), (1, 0, 4)]


def test_a_prompt_after_which_another_is_admitted_stays_whole():
    scheduler = make_scheduler(step_sizes=SIZES)
    seqs = [waiting_for_end(i, prompt(10 * i, n)) for i, n in enumerate((5, 4, 4))]
    assert shares(planned(scheduler, *seqs)) == [(0, 0, 5), (1, 0, 4), (2, 0, 4)]


def test_one_whose_tokens_are_in_flight_does_not_count_as_another():
    scheduler = make_scheduler(step_sizes=SIZES)
    seqs = [waiting_for_end(i, prompt(10 * i, n)) for i, n in enumerate((5, 4, 4))]
    seqs[2].num_in_flight = 1  # as of one that was preempted a moment ago
    assert shares(planned(scheduler, *seqs)) == [(0, 0, 5), (1, 0, 3)]


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"max_num_seqs": 2}, 4),
        ({"num_pages": 9, "reserve_full_prompt": True}, 25),  # 5 pages are free, 7 needed
        ({"num_pages": 4}, 4),  # no page is free
        ({"num_pages": 6, "admission": "no-evict"}, 4),  # 2 are free, and to be taken
    ],
)
def test_one_that_finds_no_slot_or_no_pages_does_not_count_as_another(limits, num_tokens):
    scheduler = make_scheduler(step_sizes=SIZES, **limits)
    seqs = [waiting_for_end(i, prompt(10 * i, n)) for i, n in enumerate((5, 4, num_tokens))]
    assert shares(planned(scheduler, *seqs)) == [(0, 0, 5), (1, 0, 3)]
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize("is_shared", [True, False])
def test_one_that_fits_by_the_pages_of_the_prompt_before_keeps_it_whole(is_shared):
    """Both need 6 pages, 3 are left beside the prompt before: its 5 full ones or none."""
    scheduler = make_scheduler(
        11, step_sizes=(8, 16, 64), max_num_batched_tokens=64, reserve_full_prompt=True
    )
    seqs = waiting_for_end(0, prompt(0, 5)), waiting_for_end(1, prompt(10, 20))
    third = waiting_for_end(2, prompt(10 if is_shared else 40, 21))
    found = shares(planned(scheduler, *seqs, third))
    assert found == [(0, 0, 5), *([(1, 0, 20), (2, 20, 1)] if is_shared else [(1, 0, 11)])]


@pytest.mark.parametrize("is_shared", [True, False])
def test_one_that_fits_by_the_pages_of_a_running_prompt_keeps_that_before_it_whole(is_shared):
    scheduler = make_scheduler(
        11, step_sizes=SIZES, max_num_batched_tokens=17, reserve_full_prompt=True
    )
    planned(scheduler, waiting_for_end(0, prompt(40, 17)))
    third = waiting_for_end(2, prompt(40 if is_shared else 80, 21))
    found = shares(planned(scheduler, waiting_for_end(1, prompt(10, 8)), third))
    assert found == [(0, 17, 1), *([(1, 0, 8), (2, 16, 5)] if is_shared else [(1, 0, 7)])]


def test_a_chunk_of_a_longer_prompt_stays_whole():
    scheduler = make_scheduler(step_sizes=(6, 16), long_prefill_token_threshold=4)
    seqs = waiting_for_end(0, prompt(0, 3)), waiting_for_end(1, prompt(10, 9))
    assert shares(planned(scheduler, *seqs)) == [(0, 0, 3), (1, 0, 4)]
    assert filled(3, 4, (6, 16)) == 3


@pytest.mark.parametrize("scored", [0, 1])
def test_nothing_is_cut_in_a_step_in_which_a_prompt_is_scored(scored):
    scheduler = make_scheduler(step_sizes=SIZES)
    options = [{"prompt_logprobs": 1} if i == scored else {} for i in (0, 1)]
    seqs = [waiting_for_end(i, prompt(10 * i, 5 - i), **options[i]) for i in (0, 1)]
    assert shares(planned(scheduler, *seqs)) == [(0, 0, 5), (1, 0, 4)]


def test_a_cut_prompt_that_is_preempted_comes_back_and_gets_its_answer():
    scheduler = make_scheduler(6, step_sizes=(8, 32), max_num_seqs=2)
    seqs = waiting_for_end(0, prompt(0, 7), 12), waiting_for_end(1, prompt(10, 8), 6)
    add(scheduler, *seqs)
    loop = Loop(scheduler)
    loop.step()
    assert seqs[1].num_computed_tokens == 1
    loop.run()
    assert scheduler.num_preemptions
    assert [outcome(seq) for seq in seqs] == [generate_alone(seq.request, 64) for seq in seqs]


def run_workload(step_sizes, num_pages):
    """Tokens stepped and tokens of padding; everything must have been computed in the end."""
    rng, ladder = random.Random(0), default_ladder("gpu", 64, 2048)
    limits = SchedulerLimits(
        max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1024, step_sizes=step_sizes
    )
    pool = PagePool(num_pages, 16)
    simulation = Simulation(Scheduler(limits, pool, PrefixCache(pool)), rng)
    params = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    seqs, num_tokens, padding = [], 0, 0
    for number in range(150):
        tokens = [rng.randrange(9, 32_000) for _ in range(rng.randint(32, 512))]
        seqs += simulation.add(make_request(number, tokens, rng.randint(8, 128), params=params))
    while simulation.has_work:
        plan = simulation.step()
        simulation.scheduler.check()
        if plan:
            num_tokens += plan.num_tokens
            padding += ladder.choose(plan).num_tokens - plan.num_tokens
    assert all(len(seq.output_token_ids) == seq.request.max_tokens for seq in seqs)
    assert pool.num_held == 0
    if not simulation.scheduler.num_preemptions:
        assert num_tokens == sum(seq.num_needed_tokens for seq in seqs)
    return num_tokens, padding


@pytest.mark.parametrize("num_pages", [5000, 900])
def test_a_workload_has_less_padding(num_pages):
    sizes = default_ladder("gpu", 64, 2048).step_sizes()
    (whole, before), (filling, after) = run_workload((), num_pages), run_workload(sizes, num_pages)
    assert after < 0.75 * before
    assert filling < 1.01 * whole


def test_a_record_tells_the_sizes(tmp_path):
    file = tmp_path / "run.jsonl"
    loop = Loop(RecordedScheduler(make_scheduler(step_sizes=SIZES), file))
    loop.run([waiting_for_end(i, prompt(10 * i, 5 - i)) for i in (0, 1)])
    found = replay(file)
    assert (found.mismatch, found.num_plans) == (None, loop.num_steps)
    lines = file.read_text().replace('"step_sizes":[4,8,16]', '"step_sizes":[]')
    file.write_text(lines)
    assert replay(file).mismatch is not None


def test_sizes_ascend():
    with pytest.raises(ConfigError, match=r"step_sizes is \(8, 4\), must ascend"):
        make_limits(step_sizes=(8, 4))
