"""A tokenizer built from a GGUF file's metadata alone.

Two kinds of vocabulary are served: `gpt2`, byte-level BPE with a list of merges, and `llama`,
SentencePiece BPE whose merges follow from the pieces' scores.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxpaged.errors import WeightsError
from jaxpaged.text.token_bytes import SPACE_MARK

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# How Llama 3 and Qwen 2 cut text into words before the merges: contractions, letters with one mark
# before them, digits (`%s` at a time), marks with the line ends after them, white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _split_words("{1,3}")
    if name == "qwen2":
        return _split_words("")
    raise WeightsError(
        f"tokenizer.ggml.pre is {name!r}; served are default, gpt-2, smollm, llama-bpe and qwen2: "
        "give the model as a directory with tokenizer.json"
    )


def build_vocabulary(fields: Mapping[str, Any]) -> Tokenizer:
    """The vocabulary that GGUF metadata describe, with a decoder and a post-processor.

    Raises:
        WeightsError: a kind of vocabulary that is not served, or lists that do not fit together.
    """
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise WeightsError("the GGUF metadata hold no tokenizer.ggml.tokens")
    if kind == "gpt2":
        raw = _byte_level(fields, tokens)
    elif kind == "llama":
        raw = _sentencepiece(fields, tokens)
    else:
        raise WeightsError(f"tokenizer.ggml.model is {kind!r}; served are gpt2 and llama")
    _add_tokens(raw, fields, tokens)
    _add_bos_and_eos(raw, fields, tokens)
    return raw


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    merges: list[tuple[str, str]] = []
    for merge in fields.get("tokenizer.ggml.merges", ()):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise WeightsError(f"tokenizer.ggml.merges holds {merge!r}: it takes two tokens a line")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # a whole word that is a token stays whole in Llama 3, even where no merges lead to it
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3")
    raw = Tokenizer(_bpe(vocabulary, merges, ignore_merges=whole_words))
    raw.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        raw.normalizer = normalizers.NFC()
    raw.decoder = decoders.ByteLevel()
    return raw


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises this bare type
        raise WeightsError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from None


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise WeightsError(
            f"tokenizer.ggml.scores has {len(scores)} entries, tokenizer.ggml.tokens {len(tokens)}"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_by_score(vocabulary, scores)
    raw = Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    parts: list[Any] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        parts.append(decoders.Strip(" ", 1, 0))
    raw.normalizer = normalizers.Sequence(steps)
    raw.decoder = decoders.Sequence(parts)
    return raw


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two pieces, likeliest result first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token in vocabulary.items():
        score = -scores[token]
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((score, left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(raw: Tokenizer, fields: Mapping[str, Any], tokens: list[str]) -> None:
    """Control tokens are special; tokens that users defined are matched whole, before any merge."""
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise WeightsError(
            f"tokenizer.ggml.token_type has {len(kinds)} entries, "
            f"tokenizer.ggml.tokens {len(tokens)}"
        )
    control, defined = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    raw.add_special_tokens(control)
    raw.add_tokens(defined)


def _add_bos_and_eos(raw: Tokenizer, fields: Mapping[str, Any], tokens: list[str]) -> None:
    is_sentencepiece = fields.get("tokenizer.ggml.model") == "llama"
    bos, eos = fields.get("tokenizer.ggml.bos_token_id"), fields.get("tokenizer.ggml.eos_token_id")
    template: list[str] = ["$A"]
    used: list[tuple[str, int]] = []
    if fields.get("tokenizer.ggml.add_bos_token", is_sentencepiece) and bos is not None:
        template.insert(0, tokens[bos])
        used.append((tokens[bos], bos))
    if fields.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        template.append(tokens[eos])
        used.append((tokens[eos], eos))
    if used:
        single: Any = template
        raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
