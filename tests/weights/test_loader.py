import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.errors import ConfigError, WeightsError
from jaxpaged.layers.attention import paged_attention
from jaxpaged.weights.loader import abstract_model, load_model
from tests.support.checkpoints import golden_cases, tiny_tensors, write_checkpoint
from tests.weights.refusals import refusal

CASES = golden_cases()
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def load(folder, name="llama", *, tensors=None, config=None, dtype=jnp.float32, **options):
    """Write a golden checkpoint, with changes, and load it."""
    case = CASES[name]
    tensors = tiny_tensors(case) | (tensors or {})
    tensors = {key: value for key, value in tensors.items() if value is not None}
    write_checkpoint(folder, case["config"] | (config or {}), tensors)
    return load_model(folder, dtype=dtype, **options)


@pytest.mark.parametrize("name", ["llama_linear_rope_biases", "gemma3"])
def test_the_weights_are_exactly_those_that_the_decoder_has(name, tmp_path):
    model = load(tmp_path, name)
    graphdef, abstract = abstract_model(model.config, paged_attention, jnp.float32)
    assert graphdef == model.graphdef
    assert jax.tree.structure(abstract) == jax.tree.structure(model.params)
    assert jax.tree.all(
        jax.tree.map(lambda a, p: (a.shape, a.dtype) == (p.shape, p.dtype), abstract, model.params)
    )
    merged = nnx.merge(model.graphdef, model.params)
    assert merged.config == model.config


def test_fused_weights_hold_their_parts_in_order(tmp_path):
    model, tensors = load(tmp_path), tiny_tensors(CASES["llama"])
    layer = model.params["layers"][1]
    qkv, prefix = np.asarray(layer["attention"]["qkv"]), "model.layers.1."
    q = tensors[prefix + "self_attn.q_proj.weight"].reshape(2, 2, 8, 32)
    np.testing.assert_array_equal(qkv[:, :2], q)
    for place, name in ((2, "k"), (3, "v")):
        part = tensors[f"{prefix}self_attn.{name}_proj.weight"].reshape(2, 8, 32)
        np.testing.assert_array_equal(qkv[:, place], part)
    gate_up = np.asarray(layer["feed_forward"]["gate_up"])
    np.testing.assert_array_equal(gate_up[0], tensors[prefix + "mlp.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[1], tensors[prefix + "mlp.up_proj.weight"])


def test_weights_are_cast_and_norms_stay_float32(tmp_path):
    params = load(tmp_path, dtype=jnp.bfloat16).params
    assert params["embedding"]["table"].dtype == jnp.bfloat16
    assert params["layers"][0]["attention"]["qkv"].dtype == jnp.bfloat16
    assert params["norm"]["scale"].dtype == jnp.float32


def test_one_is_added_to_the_norms_of_gemma(tmp_path):
    stored = tiny_tensors(CASES["gemma3"])["model.norm.weight"]
    scale = load(tmp_path, "gemma3").params["norm"]["scale"]
    np.testing.assert_array_equal(scale, stored + np.float32(1))


def test_values_over_float16_are_refused(tmp_path):
    big = np.full((32, 32), 1e6, np.float32)
    text = refusal(WeightsError, lambda: load(tmp_path, tensors={Q: big}, dtype=jnp.float16))
    assert Q in text
    assert "bfloat16" in text


def test_overrides_are_put_over_the_configuration(tmp_path):
    changes = {"rms_norm_eps": 0.25, "rope_parameters": {"rope_theta": 7.0}}
    model = load(tmp_path, hf_overrides=changes)
    assert model.config.norm_eps == 0.25
    assert model.config.layer_kinds[0].rope.theta == 7.0
    assert model.hf_config["rope_parameters"] == {"rope_theta": 7.0, "rope_type": "default"}


def test_a_missing_tensor_is_named_with_the_shape_that_it_should_have(tmp_path):
    text = refusal(WeightsError, lambda: load(tmp_path, tensors={Q: None}))
    assert f"{Q} [32, 32] is missing" in text


def test_an_unexpected_tensor_is_named(tmp_path):
    extra = {"model.layers.0.self_attn.extra.weight": np.zeros((3, 4), np.float32)}
    text = refusal(WeightsError, lambda: load(tmp_path, tensors=extra))
    assert "model.layers.0.self_attn.extra.weight [3, 4] is unexpected in a llama model" in text


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads x head_dim"),
        ({"head_dim": 16}, "num_attention_heads x head_dim"),
        ({"intermediate_size": 40}, "intermediate_size"),
        ({"vocab_size": 65}, "vocab_size"),
        ({"hidden_size": 64, "head_dim": 8}, "hidden_size"),
    ],
)
def test_a_wrong_shape_names_both_shapes_and_the_field_that_it_comes_from(config, fields, tmp_path):
    text = refusal(WeightsError, lambda: load(tmp_path, config=config))
    assert f"(from {fields})" in text
    assert "expected [" in text


def test_a_misshapen_tensor_is_not_taken_for_another_layout(tmp_path):
    flat = {K: np.zeros(16 * 32, np.float32)}
    text = refusal(WeightsError, lambda: load(tmp_path, tensors=flat))
    assert f"{K} is [512], expected [16, 32]" in text


def test_many_misfits_are_counted_in_one_line(tmp_path):
    text = refusal(WeightsError, lambda: load(tmp_path, config={"num_hidden_layers": 40}))
    assert "model.layers.2." in text
    assert "more" in text


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.embeddings.position_ids"]
)
def test_buffers_that_are_no_weights_are_ignored(name, tmp_path):
    load(tmp_path, tensors={name: np.zeros(4, np.float32)})


def test_a_head_beside_tied_embeddings_is_ignored(tmp_path):
    head = {"lm_head.weight": np.zeros((64, 32), np.float32)}
    assert "lm_head" not in load(tmp_path, "qwen2", tensors=head).params


def test_integer_weights_are_refused(tmp_path):
    ints = {Q: np.zeros((32, 32), np.int32)}
    assert "I32" in refusal(WeightsError, lambda: load(tmp_path, tensors=ints))


def test_dummy_weights_need_no_weights_and_depend_on_the_seed(tmp_path):
    write_checkpoint(tmp_path, CASES["gemma3"]["config"], {})
    (tmp_path / "model.safetensors").unlink()

    def dummy(seed, dtype=jnp.float32):
        return load_model(tmp_path, dtype=dtype, load_format="dummy", seed=seed).params

    first, again, other = dummy(1), dummy(1), dummy(2)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, again))
    assert not (first["embedding"]["table"] == other["embedding"]["table"]).any()
    table = np.asarray(first["embedding"]["table"])
    assert np.std(table) == pytest.approx(32**-0.5, rel=0.1)
    assert abs(table.mean()) < 0.02
    assert np.abs(np.asarray(first["norm"]["scale"]) - 1).max() <= 0.1
    assert len(np.unique(table)) > table.size * 0.9
    assert dummy(1, jnp.bfloat16)["embedding"]["table"].dtype == jnp.bfloat16


def test_weights_go_to_the_device_that_was_asked_for(tmp_path):
    device = jax.devices()[3]
    params = load(tmp_path, device=device).params
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(params))


def test_quantised_checkpoints_are_refused(tmp_path):
    config = {"quantization_config": {"quant_method": "awq"}}
    assert "quantization_config" in refusal(ConfigError, lambda: load(tmp_path, config=config))
