"""Writes tests/golden: logits of one tiny random model a family, computed by transformers.

    python benchmarks/golden/make_golden.py        # in an environment with torch and transformers

Weights are not stored: `tiny_weight` makes the same ones from a tensor's name on both sides, and
`tests/support/checkpoints.py` holds its twin. Configurations are as transformers writes them.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CASES = {
    "llama": ("llama", {}),
    "llama_llama3_rope": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear_rope_biases": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama_dynamic_rope": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
            "max_position_embeddings": 8,
        },
    ),
    "llama_yarn_rope": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "mistral_window": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 4}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 12}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": GEMMA3_ROPE,
            "final_logit_softcapping": 20.0,
        },
    ),
}
DROPPED = ("transformers_version", "dtype", "initializer_range", "use_cache")


def tiny_weight(name: str, shape: tuple[int, ...], *, norms_near_zero: bool) -> np.ndarray:
    """Random float32, from the name alone; norm weights near 1, or near 0 where 1 is added."""
    unit = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32) - 0.5
    if "norm" in name:
        return unit * 0.4 + (0.0 if norms_near_zero else 1.0)
    return unit * (3.0 / np.sqrt(shape[-1]))


def main():
    GOLDEN.mkdir(exist_ok=True)
    token_ids = np.random.default_rng(7).integers(0, SIZES["vocab_size"], 24)
    cases = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    logits = {}
    for name, (model_type, changes) in CASES.items():
        config = AutoConfig.for_model(model_type, **(SIZES | changes))
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).eval().float()
        fill(model, norms_near_zero=model_type.startswith("gemma"))
        shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            shapes.pop("lm_head.weight")
        stored = model.config.to_dict() | {"architectures": [type(model).__name__]}
        stored = {key: value for key, value in stored.items() if key not in DROPPED}
        cases[name] = {"config": stored, "shapes": shapes, "token_ids": token_ids.tolist()}
        logits[name] = compute(model, token_ids, one_by_one="dynamic" in name)
    (GOLDEN / "families.json").write_text(json.dumps(cases) + "\n")
    np.savez_compressed(GOLDEN / "families.npz", **logits)


@torch.no_grad()
def fill(model, *, norms_near_zero: bool):
    for name, parameter in model.named_parameters():
        value = tiny_weight(name, tuple(parameter.shape), norms_near_zero=norms_near_zero)
        parameter.copy_(torch.from_numpy(value))


@torch.no_grad()
def compute(model, token_ids: np.ndarray, *, one_by_one: bool) -> np.ndarray:
    """Logits of every token; one by one where the rotation depends on the length so far."""
    ids = torch.from_numpy(token_ids)[None]
    if not one_by_one:
        return model(ids).logits[0].numpy()
    cache, rows = None, []
    for place in range(ids.shape[1]):
        out = model(ids[:, place : place + 1], cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1].numpy())
    return np.stack(rows)


if __name__ == "__main__":
    main()
