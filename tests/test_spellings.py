"""vLLM's flags and keywords that mean a setting of another name here."""

import pytest

from jaxpaged.config.flags import ArgumentParser, config_from_args, config_from_keywords
from jaxpaged.config.settings import EngineConfig
from jaxpaged.errors import ConfigError
from server.flags import make_parser
from server.settings import parse

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def config_of(*flags: str) -> EngineConfig:
    parser: ArgumentParser = make_parser("serve")
    return config_from_args(parse(parser, ["--model", "m", *flags]))


def test_parts_of_speculation_may_be_flags_and_keywords():
    made = config_of("--spec-method", "ngram", "--spec-tokens", "4")
    assert made.scheduler.speculative_config == NGRAM
    made = config_from_keywords(model="m", spec_method="ngram", spec_tokens=4, spec_model=None)
    assert made.scheduler.speculative_config == NGRAM
    made = config_of("--spec-model", "small", "--spec-tokens", "3")
    assert made.scheduler.speculation is not None
    assert made.scheduler.speculation.model == "small"


def test_eager_compiles_nothing_before_it_is_needed():
    assert config_of("--enforce-eager").compile.warmup == "lazy"
    assert config_of("--no-enforce-eager").compile.warmup == "auto"
    assert config_from_keywords(model="m", enforce_eager=True).compile.warmup == "lazy"
    assert config_from_keywords(model="m", enforce_eager=False).compile.warmup == "auto"


@pytest.mark.parametrize("sizes", [("1", "2", "8"), ("1,2,8",)])
def test_capture_sizes_are_the_rows_of_decode_steps(sizes):
    assert config_of("--cudagraph-capture-sizes", *sizes).compile.batch_buckets == (1, 2, 8)
    made = config_from_keywords(model="m", cudagraph_capture_sizes=[1, 2, 8])
    assert made.compile.batch_buckets == (1, 2, 8)


@pytest.mark.parametrize(
    ("name", "choice", "other"),
    [
        ("kv-cache-dtype", "auto", "fp8"),
        ("kv-offloading-backend", "native", "lmcache"),
        ("prefix-caching-hash-algo", "sha256", "xxhash"),
    ],
)
def test_of_what_has_one_choice_another_is_refused(name, choice, other, capsys):
    assert config_of(f"--{name}", choice) == config_of()
    with pytest.raises(SystemExit):
        config_of(f"--{name}", other)
    assert choice in capsys.readouterr().err
    keyword = name.replace("-", "_")
    assert config_from_keywords(model="m", **{keyword: choice}) == config_from_keywords(model="m")
    with pytest.raises(ConfigError, match=f"served is {choice}"):
        config_from_keywords(model="m", **{keyword: other})


def test_a_size_that_is_no_number_is_told(capsys):
    with pytest.raises(SystemExit):
        config_of("--cudagraph-capture-sizes", "1", "many")
    assert "1 many are no whole numbers" in capsys.readouterr().err
