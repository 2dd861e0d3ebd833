import numpy as np
import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.core.hashing import page_hashes
from jaxpaged.core.logit_edits import row_edits
from jaxpaged.core.params import MAX_BIASES, SamplingParams
from jaxpaged.core.sequence import Sequence
from jaxpaged.engine.inputs import InputProcessor, as_list, params_for
from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.text.tokenizer import ids_only_tokenizer, load_tokenizer
from tests.support.models import VOCAB, byte_ids, byte_tokenizer, write_tokenizer


def request(page_size, **fields):
    inputs = InputProcessor(ids_only_tokenizer(), 100, 64, 0, (), page_size)
    return inputs.request(list(range(11)), SamplingParams(max_tokens=1), **fields)


def test_a_request_brings_the_hashes_of_its_pages():
    made = request(4, cache_salt="s")
    assert list(made.page_hashes) == page_hashes(range(11), 4, "s")
    assert len(made.page_hashes) == 2
    assert request(0).page_hashes == ()


def test_admission_foresees_unless_a_way_to_preempt_is_given():
    assert config_from_keywords().scheduler.admission_mode == "foresee"
    assert config_from_keywords(preemption_mode="swap").scheduler.admission_mode == "evict"
    chosen = config_from_keywords(preemption_mode="swap", admission="foresee").scheduler
    assert chosen.admission_mode == "foresee"


def test_fast_first_is_the_policy_sjf():
    assert config_from_keywords(priority_mode="FAST_FIRST").scheduler.policy == "sjf"
    assert config_from_keywords(scheduling_policy="fair").scheduler.policy == "fair"
    with pytest.raises(ConfigError, match=r"FAST_FIRST is the policy sjf.*is fair"):
        config_from_keywords(priority_mode="FAST_FIRST", scheduling_policy="fair")


def test_a_keyword_with_no_choice_of_its_setting_is_refused_as_its_flag_is():
    with pytest.raises(ConfigError, match="dtype is 'float8', allowed are auto, float32"):
        config_from_keywords(dtype="float8")
    with pytest.raises(ConfigError, match="reasoning_parser is 'x', allowed are deepseek_r1"):
        config_from_keywords(reasoning_parser="x")


def test_prompts_may_be_any_that_can_be_gone_through():
    ids = np.array([1, 2])
    assert as_list(ids) == [[1, 2]]
    assert as_list([ids, "a"]) == [[1, 2], "a"]
    assert as_list(name for name in ("a", "b")) == ["a", "b"]
    for given in (None, 5, b"a"):
        with pytest.raises(RequestError, match="prompts is"):
            as_list(given)
    with pytest.raises(RequestError, match="sampling_params is dict"):
        params_for(["a"], {"temperature": 0}, SamplingParams)


@pytest.mark.parametrize("word", ["ab", " ab", "abc", " abc"])
def test_a_banned_word_is_banned_with_and_without_a_space_before_it(tmp_path, word):
    """However many tokens either form has; and no bias brings it back."""
    write_tokenizer(tmp_path)
    raw = byte_tokenizer()
    raw.add_tokens([" ab", "abc"])  # 261, 262: one form is one token, the other several
    raw.save(str(tmp_path / "tokenizer.json"))
    inputs = InputProcessor(load_tokenizer(tmp_path), VOCAB, 512, 0, ())
    biases = {261: 100.0, 262: 100.0}
    request = inputs.request([1], SamplingParams(bad_words=[word], logit_bias=biases))
    space, a, b, c = byte_ids(" abc")
    single, runs = ((261,), {(a, b)}) if word.strip() == "ab" else ((262,), {(261, c)})
    if word.startswith(" "):
        assert set(request.banned_runs) | {(i,) for i in request.banned_ids} >= (
            {(261,)} if word == " ab" else {(261, c)}
        )
        return
    assert (request.banned_ids, set(request.banned_runs)) == (single, runs)
    ids, values = np.zeros(MAX_BIASES, np.int32), np.zeros(MAX_BIASES, np.float32)
    edits = row_edits(request, VOCAB)
    assert edits is not None
    edits.write(ids, values, Sequence(0, request, 0, [1], 1), 1)
    assert values[ids == single[0]].sum() == -np.inf
    assert space not in request.banned_ids
