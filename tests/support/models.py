"""Small checkpoints with known answers, written as Hugging Face directories.

S        successor: after token t the logits are 6.798 for next(t), 5.799 for next(next(t)), 0 else.
S-emoji  S with next = x -> F0 -> 9F -> AB -> A0 -> y -> x (the four bytes of U+1FAE0).
R        random Llama, 2 layers, 256 positions; its answers depend on the whole context.
R-bos    R with a tokenizer that adds BOS and a chat template that begins with bos_token.

All have 512 logits, on purpose more than the tokenizer has tokens (256 bytes in GPT-2 order, then
the specials). The same bytes are written every time.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB = 512
SPECIALS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]  # ids 256 to 260
BOS, EOS, PAD = 256, 257, 258
LAST_MESSAGE = "{{ messages[-1]['content'] }}"
NAMES = ("S", "S-emoji", "R", "R-bos")

# GPT-2's order: printable bytes first, then the rest, each shown as one character (A = 32, ...).
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_ORDER = PRINTABLE + [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_ID = {byte: token for token, byte in enumerate(BYTE_ORDER)}
EMOJI_RING = [BYTE_ID[byte] for byte in b"x\xf0\x9f\xab\xa0y"]


def byte_ids(text: str) -> list[int]:
    """The token ids of `text` in these models: one a byte."""
    return [BYTE_ID[byte] for byte in text.encode()]


def byte_character(token: int) -> str:
    """The character that stands for a byte token in tokenizer.json."""
    return chr(BYTE_ORDER[token] if token < len(PRINTABLE) else 256 + token - len(PRINTABLE))


def byte_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({byte_character(t): t for t in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    tokenizer.add_special_tokens(specials)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def write_tokenizer(
    folder: Path, *, adds_bos: bool = False, template: str = LAST_MESSAGE, max_len: int = 2048
) -> None:
    """tokenizer.json and tokenizer_config.json alone: enough for tests without a device."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(adds_bos=adds_bos).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        add_bos_token=adds_bos,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
        chat_template=template,
    )
    write_json(folder / "generation_config.json", **token_ids())


def token_ids() -> dict[str, int]:
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def write_checkpoint(
    folder: Path,
    tensors: dict[str, np.ndarray],
    *,
    adds_bos: bool = False,
    is_tied: bool = False,
    **shape: int,
) -> None:
    template = "{{ bos_token }}" * adds_bos + LAST_MESSAGE
    max_len = shape["max_position_embeddings"]
    write_tokenizer(folder, adds_bos=adds_bos, template=template, max_len=max_len)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCAB,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=is_tied,
        attention_bias=False,
        mlp_bias=False,
        torch_dtype="float32",
        **shape,
        **token_ids(),
    )


def write_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def llama_tensors(
    embed: np.ndarray, lm_head: np.ndarray, layers: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Hugging Face names; a layer's keys are q, k, v, o, gate, up, down; norm weights are one."""
    ones = np.ones(embed.shape[1])
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": lm_head,
        "model.norm.weight": ones,
    }
    for i, layer in enumerate(layers):
        for name, weight in layer.items():
            part = "self_attn" if name in "qkvo" else "mlp"
            tensors[f"model.layers.{i}.{part}.{name}_proj.weight"] = weight
        tensors[f"model.layers.{i}.input_layernorm.weight"] = ones
        tensors[f"model.layers.{i}.post_attention_layernorm.weight"] = ones
    return {name: np.ascontiguousarray(w, dtype=np.float32) for name, w in tensors.items()}


def random_layer(
    rng: np.random.Generator, hidden: int, kv: int, ffn: int, gains: dict[str, float]
) -> dict[str, np.ndarray]:
    """Normal weights; a gain of 1 keeps the variance of a unit input."""
    shapes = {
        "q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
    }  # fmt: skip
    return {name: rng.normal(0, gains[name] / s[1] ** 0.5, s) for name, s in shapes.items()}


def write_successor(folder: Path, table: dict[int, int]) -> None:
    """One layer that adds nothing, so the logits are a table of the last token."""
    hidden = VOCAB
    following = {t: table.get(t, (t + 1) % VOCAB) for t in range(VOCAB)}
    lm_head = np.zeros((VOCAB, hidden))
    for t, after in following.items():
        lm_head[after, t] += 6.8 / hidden**0.5
        lm_head[following[after], t] += 5.8 / hidden**0.5
    gains = {"q": 1.0, "k": 1.0, "v": 1.0, "o": 0.0, "gate": 1.0, "up": 1.0, "down": 0.0}
    layer = random_layer(np.random.default_rng(0), hidden, kv=128, ffn=64, gains=gains)
    write_checkpoint(
        folder,
        llama_tensors(np.eye(VOCAB, hidden), lm_head, [layer]),
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )


def write_random(
    folder: Path, *, adds_bos: bool = False, num_layers: int = 2, is_tied: bool = False
) -> None:
    """Strong attention makes answers depend on the prompt; logits of spread 3 keep greedy clear."""
    hidden, ffn, rng = 64, 128, np.random.default_rng(7)
    gains = {"q": 1.5, "k": 1.5, "v": 1.5, "o": 1.5, "gate": 1.0, "up": 1.0, "down": 1.5}
    embed = rng.normal(0, 1.0, (VOCAB, hidden))
    layers = [random_layer(rng, hidden, kv=32, ffn=ffn, gains=gains) for _ in range(num_layers)]
    lm_head = rng.normal(0, 3.0 / hidden**0.5, (VOCAB, hidden))
    lm_head[256 + len(SPECIALS) :] *= 0.75  # ids without a token: rare, not impossible
    write_checkpoint(
        folder,
        llama_tensors(lm_head if is_tied else embed, lm_head, layers),
        adds_bos=adds_bos,
        is_tied=is_tied,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )


def write_model(name: str, parent: Path) -> Path:
    """Write one of `NAMES` under `parent`, unless it is there, and return its directory."""
    folder = parent / name
    if (folder / "config.json").exists():
        return folder
    if name == "S":
        write_successor(folder, {})
    elif name == "S-emoji":
        after = EMOJI_RING[1:] + EMOJI_RING[:1]
        write_successor(folder, dict(zip(EMOJI_RING, after, strict=True)))
    elif name in ("R", "R-bos"):
        write_random(folder, adds_bos=name == "R-bos")
    else:
        raise ValueError(f"model is {name!r}, there are {NAMES}")
    return folder


if __name__ == "__main__":
    for each in NAMES:
        write_model(each, Path(sys.argv[1]))
