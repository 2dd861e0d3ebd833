"""What counts as an answer that repeats itself, and what may be asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.repetition import RepetitionDetectionParams, RepetitionWatch
from jaxpaged.errors import RequestError
from tests.support.repetition import num_until_repetition


@given(
    ids=st.lists(st.integers(0, 2), max_size=60),
    least=st.integers(0, 6),
    more=st.integers(0, 6),
    count=st.integers(2, 5),
)
def test_an_answer_repeats_where_its_end_is_a_pattern_so_many_times(ids, least, more, count):
    wanted = RepetitionDetectionParams(max(1, least) + more, least, count)
    watch = RepetitionWatch(wanted)
    found = next((num for num, token in enumerate(ids, 1) if watch.repeats(token)), None)
    assert found == num_until_repetition(ids, wanted)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size is -1"),
        ({"max_pattern_size": 1025}, "max_pattern_size is 1025, allowed are 0 to 1024"),
        ({"max_pattern_size": 2.5}, "max_pattern_size is 2.5"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size is 3"),
        ({"max_pattern_size": 2}, "min_count is 0, it must be at least 2"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count is 1"),
        ({"max_pattern_size": 2, "min_count": True}, "min_count is True"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(fields, says):
    with pytest.raises(RequestError, match=says) as caught:
        RepetitionDetectionParams(**fields)
    assert caught.value.param == "repetition_detection"


def test_sampling_params_take_only_their_own_kind():
    with pytest.raises(RequestError, match="give RepetitionDetectionParams"):
        SamplingParams(repetition_detection={"max_pattern_size": 2, "min_count": 2})
