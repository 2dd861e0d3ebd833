import numpy as np
import pytest

from jaxpaged.core.logit_edits import check_edits, mask_words, row_edits
from jaxpaged.core.params import MAX_BIASES, SamplingParams
from jaxpaged.errors import RequestError
from tests.core.fake_device import EOS, make_sequence

VOCAB = 70
UNUSED = VOCAB


def written(seq, position):
    """The row's used entries, in order."""
    ids = np.full(MAX_BIASES, UNUSED, np.int32)
    values = np.zeros(MAX_BIASES, np.float32)
    edits = row_edits(seq.request, VOCAB)
    assert edits is not None
    edits.write(ids, values, seq, position)
    num = int((ids != UNUSED).sum())
    assert (ids[num:] == UNUSED).all()
    assert not values[num:].any()
    return list(zip(ids[:num].tolist(), values[:num].tolist(), strict=True))


def test_a_request_without_edits_has_none():
    assert row_edits(make_sequence(params=SamplingParams()).request, VOCAB) is None


def test_biases_come_before_bans():
    params = SamplingParams(logit_bias={3: 1.5, 4: -2.0})
    seq = make_sequence(0, [1], params=params, banned_ids=(8,))
    assert written(seq, 1) == [(3, 1.5), (4, -2.0), (8, -np.inf)]


@pytest.mark.parametrize(("num_sampled", "is_banned"), [(0, True), (1, True), (2, False)])
def test_stops_are_banned_until_min_tokens_are_sampled(num_sampled, is_banned):
    params = SamplingParams(min_tokens=2, stop_token_ids=[9])
    seq = make_sequence(0, [1, 2, 3], params=params)
    assert written(seq, 3 + num_sampled) == ([(EOS, -np.inf), (9, -np.inf)] if is_banned else [])


@pytest.mark.parametrize(
    ("tokens", "banned"),
    [([1, 2, 3], [4]), ([2, 3], [4]), ([3], []), ([2, 3, 1], []), ([6], [7]), ([2, 6], [7])],
)
def test_the_last_token_of_a_banned_run_is_banned_after_its_beginning(tokens, banned):
    seq = make_sequence(0, tokens, banned_runs=((2, 3, 4), (6, 7)))
    assert written(seq, len(tokens)) == [(token, -np.inf) for token in banned]


def test_mask_bits_lie_in_order_of_token():
    words = mask_words([0, 33, 69], VOCAB)
    assert words.dtype == np.uint32
    assert words.tolist() == [1, 2, 1 << 5]


@pytest.mark.parametrize(("num_banned", "is_refused"), [(MAX_BIASES - 4, False), (509, True)])
def test_a_row_has_places_for_a_limited_number_of_ids(num_banned, is_refused):
    params = SamplingParams(logit_bias={1: 1.0}, min_tokens=1, stop_token_ids=[9])
    seq = make_sequence(0, [2], params=params, banned_ids=(8,) * num_banned, banned_runs=((2, 3),))
    if is_refused:
        with pytest.raises(RequestError, match="name 513 ids, at most 512 are allowed"):
            check_edits(seq.request)
    else:
        check_edits(seq.request)
        assert len(written(seq, 1)) == MAX_BIASES
