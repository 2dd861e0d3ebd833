"""What SamplingParams take, and what they refuse by name."""

import numpy as np
import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.structured import MAX_CHOICES, StructuredOutputsParams
from jaxpaged.errors import RequestError


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": 2.5}, "n is 2.5, which is no whole number"),
        ({"seed": 1.5}, "seed is 1.5, which is no whole number"),
        ({"logprobs": 1.5}, "logprobs is 1.5, which is no whole number"),
        ({"max_tokens": True}, "max_tokens is True, which is no whole number"),
        ({"temperature": "x"}, "temperature is 'x', which is no number"),
        ({"stop": 5}, "stop is 5: give a list"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: give a list"),
        ({"allowed_token_ids": 5}, "allowed_token_ids is 5: give a list"),
        ({"bad_words": [5]}, "bad_words holds"),
        ({"logit_bias": [5]}, "logit_bias is no mapping"),
        ({"logit_bias": {5: "x"}}, "logit_bias of token 5 is x"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is dict: give"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_name(given, says):
    with pytest.raises(RequestError, match=says) as refusal:
        SamplingParams(**given)
    assert refusal.value.param == next(iter(given))


def test_numbers_and_ids_of_numpy_are_those_of_python():
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), allowed_token_ids=np.array([3]),
        stop_token_ids=[np.int32(4)], logprob_token_ids=np.array([5, 6]),
    )  # fmt: skip
    same = SamplingParams(
        n=2, temperature=0.5, allowed_token_ids=(3,), stop_token_ids=(4,), logprob_token_ids=(5, 6)
    )
    assert repr(params) == repr(same)


def test_one_banned_word_may_stand_without_a_list():
    assert SamplingParams(bad_words="word").bad_words == ("word",)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a"] * (MAX_CHOICES + 1), f"choice has {MAX_CHOICES + 1} texts, at most {MAX_CHOICES}"),
        ("a" * (MAX_CHOICES + 1), "choice must be a list"),
        ([], "choice must be a list"),
        (["a", ""], "choice must be a list"),
    ],
)
def test_choices_that_cannot_be_are_refused_by_what_they_are(given, says):
    with pytest.raises(RequestError, match=says):
        StructuredOutputsParams(choice=given)
