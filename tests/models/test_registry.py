import pytest

from jaxpaged.config.architecture import RopeConfig
from jaxpaged.errors import ConfigError
from jaxpaged.models.registry import FAMILIES, model_config
from tests.support.checkpoints import golden_cases

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def changed(**fields):
    return {**LLAMA, **fields}


def qwen2(**fields):
    return changed(architectures=["Qwen2ForCausalLM"], **fields)


def windows(config):
    return [kind.window for kind in model_config(config, "m").layer_kinds]


def rope(config):
    return model_config(config, "m").layer_kinds[0].rope


def test_an_unknown_architecture_is_named_beside_the_known_ones():
    with pytest.raises(ConfigError) as error:
        model_config(changed(architectures=["OtherForCausalLM"]), "folder")
    text = str(error.value)
    assert text.startswith("folder: architecture OtherForCausalLM is not served")
    assert all(family.architectures[0] in text for family in FAMILIES)
    assert len(text) <= 300


def test_the_model_type_decides_where_no_architecture_is_named():
    config = changed(architectures=None, model_type="qwen2")
    assert model_config(config, "m").family == "qwen2"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", None),
        ("hidden_size", None),
        ("hidden_size", -32),
        ("hidden_size", 32.0),
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("hidden_size", 30),
        ("intermediate_size", 0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", -4),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("head_dim", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", "big"),
        ("max_position_embeddings", 0),
        ("hidden_act", "relu6"),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("rope_scaling", 2.0),
        ("rope_scaling", {"type": "mystery", "factor": 2.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        (
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
        ),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_nonsense_is_one_line_that_names_the_field(field, value):
    config = changed(rope_scaling={"type": "default"}) if field.startswith("partial") else LLAMA
    with pytest.raises(ConfigError) as error:
        model_config({**config, field: value}, "folder")
    text = str(error.value)
    assert field in text
    assert "\n" not in text
    assert len(text) <= 300


def test_missing_key_value_heads_are_as_many_as_heads():
    assert model_config(changed(num_key_value_heads=None), "m").kv_heads == 4


@pytest.mark.parametrize("name", [name for name in golden_cases() if name.startswith("llama")])
def test_the_old_spelling_of_the_rotation_means_the_same(name):
    config = golden_cases()[name]["config"]
    new = config["rope_parameters"]
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old["rope_theta"] = new["rope_theta"]
    if new["rope_type"] != "default":
        old["rope_scaling"] = {k: v for k, v in new.items() if k != "rope_theta"}
    assert model_config(old, "m") == model_config(config, "m")


def test_gemma3_in_the_old_spelling_means_the_same():
    config = golden_cases()["gemma3"]["config"]
    old = {
        key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")
    }
    old |= {
        "rope_theta": 1000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    assert model_config(old, "m") == model_config(config, "m")


def test_gemma3_without_thetas_takes_a_million_and_ten_thousand():
    config = golden_cases()["gemma3"]["config"]
    bare = {key: value for key, value in config.items() if key != "rope_parameters"}
    local, everywhere = model_config(bare, "m").layer_kinds
    assert (local.window, local.rope) == (6, RopeConfig(10_000.0))
    assert (everywhere.window, everywhere.rope) == (None, RopeConfig(1_000_000.0))


def test_yarn_derives_its_attention_factor_and_extends_the_context():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = model_config(changed(rope_scaling=scaling), "m")
    assert config.max_len == 512
    assert config.layer_kinds[0].rope.attention_factor == pytest.approx(1.1386294)
    given = {**scaling, "attention_factor": 1.5}
    assert rope(changed(rope_scaling=given)).attention_factor == 1.5
    both = {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert rope(changed(rope_scaling=both)).attention_factor == 1.0


@pytest.mark.parametrize(("kind", "longest"), [("linear", 320), ("dynamic", 320)])
def test_linear_and_dynamic_scaling_extend_the_context(kind, longest):
    scaling = {"type": kind, "factor": 2.5}
    assert model_config(changed(rope_scaling=scaling), "m").max_len == longest


def test_llama3_scaling_keeps_the_stated_context():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = model_config(changed(rope_scaling=scaling), "m")
    assert config.max_len == 128
    assert config.layer_kinds[0].rope == RopeConfig(10_000.0, "llama3", 8.0, 32)


def test_mistral_slides_by_4096_unless_told_and_not_at_all_if_null():
    mistral = changed(architectures=["MistralForCausalLM"])
    assert windows(mistral) == [4096] * 4
    assert windows({**mistral, "sliding_window": 7}) == [7] * 4
    assert windows({**mistral, "sliding_window": None}) == [None] * 4


def test_qwen2_slides_only_when_use_sliding_window_says_so():
    config = qwen2(sliding_window=7, max_window_layers=1)
    assert windows(config) == [None] * 4
    assert windows({**config, "use_sliding_window": True}) == [None, 7, 7, 7]
    types = ["sliding_attention", *["full_attention"] * 3]
    assert windows({**config, "use_sliding_window": True, "layer_types": types}) == [7, *[None] * 3]


def test_layer_types_must_fit_the_layers():
    for types in (["full_attention"], ["full_attention"] * 3 + ["chunked_attention"], "full"):
        with pytest.raises(ConfigError, match="layer_types"):
            model_config(qwen2(use_sliding_window=True, sliding_window=7, layer_types=types), "m")


def test_soft_caps_of_gemma2_are_on_by_default_and_off_when_null():
    config = golden_cases()["gemma2"]["config"]
    bare = {key: value for key, value in config.items() if "softcapping" not in key}
    default = model_config(bare, "m")
    assert (default.attention_soft_cap, default.logit_soft_cap) == (50.0, 30.0)
    off = model_config(bare | {"final_logit_softcapping": None}, "m")
    assert off.logit_soft_cap is None
