"""GGUF files: tensors dequantised to float32, metadata turned into a configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from jaxpaged.config.architecture import RopeConfig
from jaxpaged.errors import ConfigError, WeightsError
from jaxpaged.layers.rope import frequencies
from jaxpaged.weights.file_bytes import FileBytes
from jaxpaged.weights.gguf_header import GgufHeader, read_header
from jaxpaged.weights.source import TensorInfo, clip

PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FIRST_BIAS = "model.layers.0.self_attn.q_proj.bias"
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Arch:
    """One `general.architecture`: the class that it stands for, and its layers' names."""

    architecture: str
    layer_names: Mapping[str, str]
    theta: float = 10_000.0


ARCHS = {
    "llama": Arch("LlamaForCausalLM", LAYER_NAMES),
    "qwen2": Arch("Qwen2ForCausalLM", LAYER_NAMES),
    "qwen3": Arch("Qwen3ForCausalLM", LAYER_NAMES, 1_000_000.0),
    "gemma2": Arch("Gemma2ForCausalLM", LAYER_NAMES | GEMMA_NORMS),
    "gemma3": Arch("Gemma3ForCausalLM", LAYER_NAMES | GEMMA_NORMS, 1_000_000.0),
}


class GgufSource:
    """A GGUF file under the names that its family's checkpoints have on the hub.

    `hf_config` is the configuration that such a checkpoint would carry. Norm weights hold their
    whole factor already.
    """

    def __init__(self, path: Path):
        self.label = path.name
        header = read_header(path)
        name = header.metadata.get("general.architecture")
        if name not in ARCHS:
            known = ", ".join(ARCHS)
            raise ConfigError(
                clip(f"{path.name}: architecture {name!r} is not served, known are {known}")
            )
        self._names = {_hub_name(ours, ARCHS[name]): ours for ours in header.tensors}
        self.tensors: dict[str, TensorInfo] = {
            theirs: header.tensors[ours] for theirs, ours in self._names.items()
        }
        self._file = FileBytes(path)
        self._permuted_heads: dict[str, int] = {}
        self.hf_config = _hf_config(name, header, self)
        self._permuted_heads = _permuted_heads(name, self.hf_config)

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        heads = self._permuted_heads.get(name.split(".")[-2])
        if heads is None:
            return self._rows(name, start, stop)
        num_rows = self.tensors[name].shape[0]
        if num_rows % (2 * heads):
            return self._rows(name, start, stop)  # misshapen: the loader says so
        size = num_rows // heads  # the rows of whole heads, in which the pairs are
        first, last = start // size, -(-stop // size)
        rows = _unpermute(self._rows(name, first * size, last * size), last - first)
        return rows[start - first * size : stop - first * size]

    def read_into(self, name: str, start: int, out: NDArray[Any]) -> bool:
        return False

    def _rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        info = self.tensors[name]
        if info.dtype not in PLAIN and info.dtype not in QUANTIZED:
            kinds = ", ".join((*PLAIN, *QUANTIZED))
            ours = self._names[name]
            raise WeightsError(clip(f"{self.label}: {ours} is {info.dtype}, read are {kinds}"))
        row_bytes = (info.stop - info.start) // info.shape[0]
        data = self._file.read(info.start + start * row_bytes, info.start + stop * row_bytes)
        shape = (stop - start, *info.shape[1:])
        if info.dtype in PLAIN:
            return data.view(PLAIN[info.dtype]).reshape(shape)
        # as one long row: the library would take 16 rows a turn, which costs twice the time
        values = dequantize(data.reshape(1, -1), GGMLQuantizationType[info.dtype])
        return values.reshape(shape)


def _hub_name(name: str, arch: Arch) -> str:
    """The hub's name of a tensor; one that we do not know keeps its own and is reported later."""
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in arch.layer_names:
        return f"model.layers.{layer[1]}.{arch.layer_names[layer[2]]}.{kind}"
    return name


def _permuted_heads(arch: str, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Projections whose rows are interleaved in pairs, and their heads."""
    heads = hf_config.get("num_attention_heads")
    kv_heads = hf_config.get("num_key_value_heads", heads)
    if arch != "llama" or not isinstance(heads, int) or not isinstance(kv_heads, int):
        return {}
    return {"q_proj": heads, "k_proj": kv_heads}


def _unpermute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    # the file holds each head's rows as pairs (i, i + half); we rotate halves
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _hf_config(arch: str, header: GgufHeader, source: GgufSource) -> dict[str, Any]:
    def field(name: str, default: Any = None) -> Any:
        return header.metadata.get(f"{arch}.{name}", default)

    embedding = source.tensors.get("model.embed_tokens.weight")
    config = {
        "architectures": [ARCHS[arch].architecture],
        "vocab_size": embedding.shape[0] if embedding else None,
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("attention.key_length"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", ARCHS[arch].theta),
        "rope_scaling": _rope_scaling(field, header, source),
        "tie_word_embeddings": "lm_head.weight" not in source.tensors,
        "attention_bias": arch == "llama" and FIRST_BIAS in source.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if arch.startswith("gemma"):
        config |= _gemma_fields(arch, field)
    elif field("attention.sliding_window"):
        window = {"sliding_window": field("attention.sliding_window"), "use_sliding_window": True}
        config |= window | ({"architectures": ["MistralForCausalLM"]} if arch == "llama" else {})
    return {name: value for name, value in config.items() if value is not None}


def _gemma_fields(arch: str, field: Any) -> dict[str, Any]:
    # the file leaves the query scale out: the 27B models take embed / heads, the others head_dim
    query_scale = field("attention.key_length", 256)
    if field("block_count") == {"gemma2": 46, "gemma3": 62}[arch]:
        query_scale = field("embedding_length", 0) // max(field("attention.head_count", 1), 1)
    return {
        "query_pre_attn_scalar": query_scale,
        "sliding_window": field("attention.sliding_window"),
        "attn_logit_softcapping": field("attn_logit_softcapping"),
        "final_logit_softcapping": field("final_logit_softcapping"),
    }


def _rope_scaling(field: Any, header: GgufHeader, source: GgufSource) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(source, field("rope.freq_base", 10_000.0))
    kind, factor = field("rope.scaling.type"), field("rope.scaling.factor")
    if kind in (None, "none") or factor is None:
        return None
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": field("rope.scaling.original_context_length"),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _llama3_scaling(source: GgufSource, theta: float) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, which the file keeps only as a divisor per frequency.

    The largest divisor is its factor, the other numbers are the same in all those models; divisors
    that do not follow from them are refused.
    """
    name = "rope_freqs.weight"
    divisors = source.read(name, 0, source.tensors[name].shape[0]).astype(np.float64)
    rope = RopeConfig(theta, "llama3", float(np.max(divisors)), 8192, 1.0, 4.0)
    head_dim = 2 * divisors.size
    expected = frequencies(head_dim, RopeConfig(theta)) / frequencies(head_dim, rope)
    if divisors.ndim != 1 or not np.allclose(divisors, expected, rtol=1e-3):
        raise WeightsError(clip(f"{source.label}: {name} is no Llama 3 scaling: not served"))
    return {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_len,
    }
