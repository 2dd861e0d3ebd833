"""Writes tests/golden/pooling: vectors and scores of tiny random models, computed by transformers.

    python benchmarks/golden/make_pooling_golden.py    # where make_golden.py runs

Each text is computed alone, without padding. Of a decoder it is the last token's hidden state.
"""

import json

import numpy as np
import torch
import transformers
from make_golden import DROPPED, GOLDEN, SIZES, fill
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

BERT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
CASES = {
    "qwen3": (AutoModel, "qwen3", SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "bert": (AutoModel, "bert", BERT),
    "bert_classifier": (AutoModelForSequenceClassification, "bert", BERT | {"num_labels": 1}),
}
TEXT_LENS = (9, 1, 30, 16, 2, 23)


@torch.no_grad()
def main():
    random = np.random.default_rng(11)
    texts = [random.integers(0, SIZES["vocab_size"], length).tolist() for length in TEXT_LENS]
    seconds = [length // 2 for length in TEXT_LENS]  # where the second of a pair begins
    cases = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    results = {}
    for name, (kind, model_type, sizes) in CASES.items():
        config = AutoConfig.for_model(model_type, **sizes)
        config._attn_implementation = "eager"
        model = kind.from_config(config).eval().float()
        fill(model, norms_near_zero=False)
        stored = model.config.to_dict() | {"architectures": [type(model).__name__]}
        stored = {key: value for key, value in stored.items() if key not in DROPPED}
        shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
        cases[name] = {"config": stored, "shapes": shapes, "texts": texts, "seconds": seconds}
        results |= compute(name, model, texts, seconds)
    (GOLDEN / "pooling.json").write_text(json.dumps(cases) + "\n")
    np.savez_compressed(GOLDEN / "pooling.npz", **results)


def compute(name: str, model, texts: list, seconds: list) -> dict[str, np.ndarray]:
    """Results by name, one row a text."""
    ids = [torch.tensor([text]) for text in texts]
    if name == "bert_classifier":
        pairs = zip(ids, seconds, strict=True)
        types = [(torch.arange(x.shape[1]) >= second).long()[None] for x, second in pairs]
        logits = [model(x, token_type_ids=t).logits[0] for x, t in zip(ids, types, strict=True)]
        return {name: torch.stack(logits).numpy()}
    hidden = [model(x).last_hidden_state[0] for x in ids]
    if name == "bert":
        return {
            "bert_cls": torch.stack([h[0] for h in hidden]).numpy(),
            "bert_mean": torch.stack([h.mean(dim=0) for h in hidden]).numpy(),
        }
    return {name: torch.stack([h[-1] for h in hidden]).numpy()}


if __name__ == "__main__":
    main()
