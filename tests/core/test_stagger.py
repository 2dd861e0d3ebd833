import pytest

from jaxpaged.core import stagger
from jaxpaged.core.stagger import MOST_WAVES, Kind, Room, Stagger, count_steps, find_stagger


def test_sequences_that_begin_together_need_most_pages_together():
    room = Room(pages=6, page_size=4, seqs=8)
    kinds = [Kind(prompt=4, answer=8, count=3)]  # of up to three pages each
    # two, whose pages come back in step 9; the third then, at the next look in step 12
    assert count_steps(kinds, room, None) == 12 + 9
    # one, another four steps later, and four steps later the third: the first's pages go to it
    assert count_steps(kinds, room, Stagger(first=1, tokens=4)) == 8 + 9


def test_more_end_sooner_where_some_begin_later():
    room = Room(pages=6875, page_size=16, seqs=256)
    kinds = [Kind(128, 512, 256)]
    found = find_stagger(kinds, room)
    assert found is not None
    assert count_steps(kinds, room, found) < 0.85 * count_steps(kinds, room, None)


@pytest.mark.parametrize("seqs", [1, 256])
def test_where_all_fit_or_none_beside_another_nobody_waits(seqs):
    assert find_stagger([Kind(128, 512, 256)], Room(256 * 40, 16, seqs)) is None


def test_a_gain_of_few_steps_is_no_reason_to_wait(monkeypatch):
    monkeypatch.setattr(stagger, "LEAST_GAIN", 0.3)
    assert find_stagger([Kind(128, 512, 256)], Room(6875, 16, 256)) is None


def test_of_very_many_the_first_are_looked_at():
    room = Room(6875, 16, 256)
    many = find_stagger([Kind(128, 512, 10**6)], room)
    assert many == find_stagger([Kind(128, 512, MOST_WAVES * 256)], room)


def test_later_kinds_begin_after_those_before_them():
    room = Room(pages=10, page_size=4, seqs=1)
    assert count_steps([Kind(4, 12, 1), Kind(4, 4, 2)], room, None) == 16 + 8 + 4 + 1
