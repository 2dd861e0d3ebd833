"""GGUF files written by the gguf package, read by us."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxpaged.config.architecture import RopeConfig
from jaxpaged.errors import ConfigError, WeightsError
from jaxpaged.layers.rope import frequencies
from jaxpaged.models.registry import model_config
from jaxpaged.weights.gguf import GgufSource
from jaxpaged.weights.loader import load_model
from tests.support.checkpoints import golden_cases, golden_logits, tiny_tensors
from tests.support.decoding import logits_of
from tests.weights.refusals import refusal

KINDS = (Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
K_KINDS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name, names):
    *stem, kind = name.split(".")
    if stem[:2] == ["model", "layers"]:
        return f"blk.{stem[2]}.{names['.'.join(stem[3:])]}.{kind}"
    return f"{names['.'.join(stem)]}.{kind}"


def permuted(rows, heads):
    """What converters to GGUF do to the query and key rows of Llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, arch, config, tensors, **fields):
    """Write `tensors`, a dict of arrays, or of (bytes, kind) for quantised ones."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add = writer.add_uint32 if isinstance(value, int) else add
        add(f"{arch}.{name.replace('__', '.')}", value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_case(path, name, arch, **fields):
    """One of the golden checkpoints as a GGUF file."""
    case = golden_cases()[name]
    config, tensors = {"head_dim": 8, **case["config"]}, {}
    names = GEMMA_NAMES if arch.startswith("gemma") else NAMES
    for tensor_name, value in tiny_tensors(case).items():
        if arch == "llama" and "q_proj" in tensor_name:
            value = permuted(value, config["num_attention_heads"])
        if arch == "llama" and "k_proj" in tensor_name:
            value = permuted(value, config["num_key_value_heads"])
        if arch.startswith("gemma") and "norm" in tensor_name:
            value = value + 1
        tensors[gguf_name(tensor_name, names)] = value
    return write_gguf(path, arch, config, tensors, **fields), case


@pytest.mark.parametrize(
    ("name", "arch", "fields"),
    [
        ("llama", "llama", {"rope__freq_base": 10000.0}),
        ("qwen3", "qwen3", {"rope__freq_base": 10000.0}),
        ("gemma2", "gemma2", {"attention__sliding_window": 6, "attn_logit_softcapping": 50.0,
                              "final_logit_softcapping": 30.0}),
    ],
)  # fmt: skip
def test_a_gguf_file_gives_the_logits_of_the_checkpoint_that_it_was_made_from(
    name, arch, fields, tmp_path
):
    path, case = write_case(tmp_path / "m.gguf", name, arch, **fields)
    overrides = {"query_pre_attn_scalar": 12} if name == "gemma2" else {}
    model = load_model(path, dtype=jnp.float32, hf_overrides=overrides)
    logits = logits_of(model.graphdef, model.params, model.config, case["token_ids"], [24])
    np.testing.assert_allclose(logits, golden_logits(name), rtol=0, atol=1e-4)


def small_config(**changes):
    return {**golden_cases()["llama"]["config"], **changes}


def read_all(path, name, rows):
    return np.asarray(GgufSource(path).read(name, 0, rows), np.float32)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_packages_own_dequantisation(kind, tmp_path):
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, kind)
    tensors = {"token_embd.weight": (packed, kind)}
    path = write_gguf(tmp_path / "m.gguf", "llama", small_config(), tensors)
    want = gguf.quants.dequantize(packed, kind)
    np.testing.assert_array_equal(read_all(path, "model.embed_tokens.weight", 6), want)
    part = GgufSource(path).read("model.embed_tokens.weight", 2, 5)
    np.testing.assert_array_equal(np.asarray(part, np.float32), want[2:5])
    assert np.abs(want - values).max() < 0.5


@pytest.mark.parametrize("kind", K_KINDS, ids=lambda kind: kind.name)
def test_k_quants_are_read_row_by_row(kind, tmp_path):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", small_config(), {"token_embd.weight": (packed, kind)}
    )
    source = GgufSource(path)
    assert source.tensors["model.embed_tokens.weight"].shape == (3, 2 * block)
    want = gguf.quants.dequantize(packed, kind)
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight", 1, 3), want[1:])


def test_a_type_that_is_not_read_is_named_when_it_is_needed(tmp_path):
    kind = Kind.IQ4_NL
    packed = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", small_config(), {"token_embd.weight": (packed, kind)}
    )
    source = GgufSource(path)
    text = refusal(WeightsError, lambda: source.read("model.embed_tokens.weight", 0, 2))
    assert "token_embd.weight is IQ4_NL" in text
    assert "Q4_K" in text


def test_an_unknown_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mamba", small_config(), {})
    assert "'mamba'" in refusal(ConfigError, lambda: GgufSource(path))


def test_llama3_scaling_is_found_in_its_divisors(tmp_path):
    rope = RopeConfig(500_000.0, "llama3", 32.0, 8192)
    plain = frequencies(64, RopeConfig(500_000.0)).astype(np.float64)
    divisors = (plain / frequencies(64, rope)).astype(np.float32)
    tensors = {"token_embd.weight": np.zeros((4, 32), np.float32), "rope_freqs.weight": divisors}
    config = small_config(head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", "llama", config, tensors, rope__freq_base=500_000.0)
    found = model_config(GgufSource(path).hf_config, "m").layer_kinds[0].rope
    assert (found.kind, found.original_max_len) == ("llama3", 8192)
    assert found.factor == pytest.approx(32.0, rel=1e-5)

    tensors["rope_freqs.weight"] = np.linspace(1, 32, 32, dtype=np.float32)
    path = write_gguf(tmp_path / "n.gguf", "llama", config, tensors, rope__freq_base=500_000.0)
    assert "rope_freqs.weight" in refusal(WeightsError, lambda: GgufSource(path))


def test_metadata_becomes_a_configuration(tmp_path):
    tensors = {"token_embd.weight": np.zeros((70, 32), np.float32)}
    path = write_gguf(
        tmp_path / "m.gguf",
        "qwen2",
        small_config(head_dim=16),
        tensors,
        rope__freq_base=1e6,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
    )
    config = model_config(GgufSource(path).hf_config, "m")
    assert (config.family, config.vocab, config.head_dim, config.max_len) == ("qwen2", 70, 16, 128)
    assert (config.tied_embeddings, config.qkv_bias) == (True, True)
    assert config.layer_kinds[0].rope.theta == 1e6
