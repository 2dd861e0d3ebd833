"""Throughput of answers held to a JSON schema, beside the same answers' lengths without one.

    python -m benchmarks.structured_speed --model benchmarks/configs/llama3-8b --load-format dummy

Batch 64 by default, temperature 1, three answers a place in the batch. The tokenizer is made up: as
many tokens as the model has logits, all single bytes and random words among them. What is compared:
tokens a second with the schema, without it (both at temperature 1, so the same sampling program but
for masks), and greedy without it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxpaged.config.flags import add_engine_flags, config_from_args
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.structured import StructuredOutputsParams
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.llm import LLM
from jaxpaged.text.token_bytes import CHARACTER_OF

PROMPT_LEN = 128
SCHEMA = {
    "type": "array",
    "minItems": 5,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "kind": {"enum": ["person", "place", "thing", "idea"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 100000},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "count", "score", "tags"],
    },
}
PIECES = (
    '{"',
    '":',
    '": ',
    '",',
    '", "',
    '"}',
    "},",
    "[{",
    "}]",
    '":"',
    "[]",
    "true",
    "null",
    "  ",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--answers", type=int, default=0, help="default: three times the batch")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    add_engine_flags(parser)
    args = parser.parse_args()
    model = Path(args.__dict__["model.model"])
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab)
        args.__dict__["model.tokenizer"] = folder
        args.__dict__["scheduler.max_num_seqs"] = args.batch
        llm = LLM.from_parts(build_engine(config_from_args(args), warm=True, show_progress=True))
    measure(llm, args.answers or 3 * args.batch, args.answer_tokens, args.runs)


def measure(llm: LLM, num_answers: int, answer_tokens: int, runs: int) -> None:
    """Print a line of JSON a kind, and the ratios; the best of `runs` counts."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(256, llm.model_config.vocab - 1000, (num_answers, PROMPT_LEN)).tolist()
    schema = StructuredOutputsParams(json=SCHEMA)
    start = time.monotonic()
    llm.parts.inputs.grammars.compile(schema)
    say(kind="compile", seconds=round(time.monotonic() - start, 3))
    held = [
        SamplingParams(structured_outputs=schema, max_tokens=answer_tokens, seed=seed)
        for seed in range(num_answers)
    ]
    lengths, _ = run(llm, prompts, held)  # also compiles what was not compiled
    free = [
        SamplingParams(max_tokens=length, ignore_eos=True, seed=seed)
        for seed, length in enumerate(lengths)
    ]
    greedy = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in lengths]
    kinds = {"schema": held, "sampled": free, "greedy": greedy}
    best = dict.fromkeys(kinds, 0.0)
    for params in kinds.values():
        run(llm, prompts, params)
    for _ in range(runs):
        for kind, params in kinds.items():
            _, rate = run(llm, prompts, params)
            best[kind] = max(best[kind], rate)
            say(kind=kind, tokens=sum(lengths), tokens_per_s=round(rate, 1))
    for kind in ("sampled", "greedy"):
        say(compared=f"schema to {kind}", ratio=round(best["schema"] / best[kind], 4))


def run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[int], float]:
    """The answers' lengths, and tokens a second."""
    llm.reset_prefix_cache()
    start = time.monotonic()
    outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    seconds = time.monotonic() - start
    for output, one in zip(outputs, params, strict=True):
        if one.structured_outputs is not None:
            json.loads(output.text)
    lengths = [len(output.token_ids) for output in outputs]
    return lengths, sum(lengths) / seconds


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer of `vocab` tokens: all bytes, JSON's pieces, then random words."""
    rng = np.random.default_rng(7)
    texts = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
    seen = set(texts)
    while len(texts) < vocab - 1:
        lengths = rng.integers(2, 10, 4096)
        letters = rng.choice(list(b"etaoinshrdlucmfwypvbgkjqxz"), (4096, 10)).astype(np.uint8)
        spaces = rng.random(4096) < 0.5
        for row, length, space in zip(letters, lengths, spaces, strict=True):
            word = b" " * bool(space) + row[:length].tobytes()
            if word not in seen and len(texts) < vocab - 1:
                seen.add(word)
                texts.append(word)
    shown = ["".join(CHARACTER_OF[byte] for byte in text) for text in texts]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(shown)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )


def say(**fields: object) -> None:
    print(json.dumps(fields))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
