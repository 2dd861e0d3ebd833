"""Perplexity of a model over a text, in windows that are scored apart, beside transformers' figure.

    python benchmarks/golden/perplexity.py MODEL [--window 512] [--text FILE]

No BOS; the first token of each window is not scored. SmolLM2-135M-Instruct in float32 on the text
that stands in `tests/reference` must give 29.6191 at 512 (transformers 5.24, float32). transformers
reads that model's GGUF without its split at digits, so `--plain-bytes` makes the same ids here; the
model's own split gives 27 tokens fewer and 29.684.
"""

import argparse
import hashlib
import math
import sys
from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers

from jaxpaged import LLM, SamplingParams

TEXT = Path(__file__).parent.parent.parent / "tests" / "reference" / "britannica_shakespeare.txt"
WANTED, TOLERANCE = 29.6191, 0.01


def perplexity(llm: LLM, text: str, window: int) -> tuple[int, float]:
    """How many tokens were scored, and the exponential of their mean negative log-probability."""
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()
    print(f"{len(ids)} tokens, SHA-256 of the ids {digest[:16]}")
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    windows = [part for part in windows if len(part) > 1]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": part} for part in windows], params)
    scores = [
        place[token].logprob
        for output in outputs
        for place, token in zip(
            output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
        )
    ]
    return len(scores), math.exp(-math.fsum(scores) / len(scores))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--plain-bytes", action="store_true", help="no split but byte level's own")
    args = parser.parse_args()
    with LLM(args.model, max_model_len=args.window + 1, enable_prefix_caching=False) as llm:
        if args.plain_bytes:
            llm.get_tokenizer().raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        count, value = perplexity(llm, args.text.read_text(encoding="utf-8"), args.window)
    print(f"{count} tokens scored, perplexity {value:.4f}")
    is_reference = args.text == TEXT and args.window == 512 and args.plain_bytes
    return int(is_reference and abs(value - WANTED) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
