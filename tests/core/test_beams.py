"""Beam search on made-up models, and the pages that its requests take."""

import math
import random

import pytest

from jaxpaged.core.beams import Beams, BeamSearchParams
from jaxpaged.core.params import SamplingParams
from jaxpaged.errors import RequestError
from tests.core.fake_device import Loop, make_scheduler, make_sequence

EOS = 9


def search(table, width, max_tokens, **options):
    """Run a search where `table` gives the logprobs after each run of tokens."""
    params = BeamSearchParams(width, max_tokens, **options)
    beams = Beams((0,), params, {EOS})
    while not beams.is_finished:
        beams.extend([table[beam.token_ids[1:]] for beam in beams.live])
    return [(beam.token_ids[1:], round(beam.cum_logprob, 6)) for beam in beams.best()], beams


def test_a_beam_that_begins_worse_may_win():
    table = {
        (): {1: -0.5, 2: -0.9},
        (1,): {3: -2.0, 4: -2.1},
        (2,): {3: -0.1, 4: -3.0},
    }
    assert search(table, 1, 2)[0] == [((1, 3), -2.5)]
    assert search(table, 2, 2)[0] == [((2, 3), -1.0), ((1, 3), -2.5)]


def test_ended_beams_compete_with_longer_ones_by_length():
    table = {(): {EOS: -0.6, 1: -0.8}, (1,): {1: -0.3, EOS: -2.0}, (1, 1): {1: -0.3, 2: -9.0}}
    found, beams = search(table, 1, 3)
    assert found == [((1, 1, 1), -1.4)]  # -1.4 / 4 beats -0.6 / 1
    assert search(table, 1, 3, length_penalty=0.0)[0] == [((EOS,), -0.6)]
    assert [beam.finish_reason for beam in beams.best()] == ["length"]
    ignoring = search(table | {(EOS,): table[(1,)]}, 1, 2, ignore_eos=True)
    assert ignoring[0] == [((EOS, 1), -0.9)]


def test_a_search_ends_when_no_beam_is_left():
    found, beams = search({(): {EOS: -0.1}}, 2, 5)
    assert (found, beams.is_finished) == ([((EOS,), -0.1)], True)


@pytest.mark.parametrize(
    ("width", "max_tokens", "penalty", "field"),
    [
        (0, 4, 1.0, "beam_width"),
        (11, 4, 1.0, "beam_width"),
        (2, 0, 1.0, "max_tokens"),
        (2, 4, 1e308, "length_penalty"),
        (2, 4, -11.0, "length_penalty"),
        (2, 4, math.nan, "length_penalty"),
    ],
)
def test_what_cannot_be_searched_is_refused(width, max_tokens, penalty, field):
    with pytest.raises(RequestError) as refusal:
        BeamSearchParams(width, max_tokens, length_penalty=penalty)
    assert refusal.value.param == field


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_the_largest_length_penalties_have_finite_scores(penalty):
    params = BeamSearchParams(1, 1, length_penalty=penalty)
    beams = Beams((0,) * 2**20, params, {EOS})
    beams.extend([{1: -2.0, 2: -1.0}])
    assert [beam.token_ids[-1] for beam in beams.best()] == [2]


@pytest.mark.parametrize("prompt_len", [1000, 1008])
def test_beams_share_all_pages_but_their_last_ones(prompt_len):
    page_size, width, num_steps = 16, 8, 36
    choose = random.Random(1)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, copies_begun_page=True)
    limits = {"max_num_seqs": width, "max_num_batched_tokens": 2048, "max_model_len": 1100}
    most = math.ceil(prompt_len / page_size) + width * (math.ceil(num_steps / page_size) + 1)
    loop = Loop(make_scheduler(num_pages=most + 1, page_size=page_size, **limits))
    beams = [[choose.randrange(30) for _ in range(prompt_len)]]
    for step in range(num_steps):
        seqs = [
            make_sequence(100 * step + i, tokens, 1, params=params)
            for i, tokens in enumerate(beams)
        ]
        held, computed = run(loop, seqs)
        generated = step + 1
        assert held <= math.ceil(prompt_len / page_size) + width * (
            math.ceil(generated / page_size) + 1
        )
        assert computed == (len(beams) if step else prompt_len)
        parents = [choose.choice(beams) for _ in range(width)]
        beams = [[*parent, token] for token, parent in enumerate(parents)]


def run(loop, seqs):
    """The most pages held at once, and the tokens computed."""
    held = computed = 0
    for seq in seqs:
        loop.scheduler.add(seq)
    while loop.scheduler.has_work or loop.in_flight:
        before = len(loop.in_flight)
        loop.step()
        held = max(held, loop.scheduler.pool.num_held)
        if len(loop.in_flight) > before or loop.in_flight:
            computed += loop.in_flight[-1][0].num_tokens if loop.in_flight[-1][0] else 0
    return held, computed
