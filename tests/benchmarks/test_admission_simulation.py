"""Modes of admission where pages are few: the modelled runs end as they should."""

import pytest

from benchmarks.admission_simulation import MODES, Ask, play


def asks(*, known):
    lengths = [8 + 37 * i % 90 for i in range(80)]
    return [
        Ask([100 + i] * (5 + 11 * i % 60), length, length if known else 400)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("known", [True, False])
def test_every_answer_is_made_and_foresight_computes_less_twice(known):
    requests = asks(known=known)
    evict, no_evict, foresee = (play(requests, mode, 100) for mode in MODES)
    made = sum(ask.length for ask in requests)
    assert {found.num_output_tokens for found in (evict, no_evict, foresee)} == {made}
    assert no_evict.num_preemptions == 0
    assert foresee.num_preemptions < evict.num_preemptions
    assert foresee.num_tokens < evict.num_tokens
    assert foresee.num_steps < no_evict.num_steps
    if known:
        least = made + sum(len(ask.prompt) - 1 for ask in requests)
        assert (foresee.num_preemptions, foresee.num_tokens) == (0, least)
    assert foresee.seconds < no_evict.seconds
