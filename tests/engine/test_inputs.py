import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.prefix_cache import page_hashes
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.errors import ConfigError
from jaxpaged.text.tokenizer import ids_only_tokenizer


def request(page_size, **fields):
    inputs = InputProcessor(ids_only_tokenizer(), 100, 64, 0, (), page_size)
    return inputs.request(list(range(11)), SamplingParams(max_tokens=1), **fields)


def test_a_request_brings_the_hashes_of_its_pages():
    made = request(4, cache_salt="s")
    assert list(made.page_hashes) == page_hashes(range(11), 4, "s")
    assert len(made.page_hashes) == 2
    assert request(0).page_hashes == ()


def test_fast_first_is_the_policy_sjf():
    assert config_from_keywords(priority_mode="FAST_FIRST").scheduler.policy == "sjf"
    assert config_from_keywords(scheduling_policy="fair").scheduler.policy == "fair"
    with pytest.raises(ConfigError, match=r"FAST_FIRST is the policy sjf.*is fair"):
        config_from_keywords(priority_mode="FAST_FIRST", scheduling_policy="fair")
