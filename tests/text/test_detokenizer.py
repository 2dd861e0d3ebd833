"""Streamed text is the whole text: any split, any character, any stop string."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.text.tokenizer_files import TokenizerInfo
from tests.support.models import byte_ids, byte_tokenizer
from tests.text.conftest import reference_items
from tests.text.test_tokenizer import sentencepiece_fields

calm = settings(deadline=None)
PROMPT = [32]


@dataclass
class Params:
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


def make_tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), TokenizerInfo())


BYTES = make_tokenizer()
PIECES = load_tokenizer("x.gguf", gguf_fields=sentencepiece_fields(add_space_prefix=True))


def stream(
    tokenizer: Tokenizer, pieces: list[list[int]], params: Params, prompt: list[int] = PROMPT
) -> tuple[list[str], str | None, int]:
    """Chunks, the stop string that was met, and the number of tokens taken."""
    detokenizer = Detokenizer(tokenizer, prompt, params)
    chunks, stopped_by = [], None
    for piece in pieces:
        chunk, stopped_by = detokenizer.push(piece)
        chunks.append(chunk)
        if stopped_by is not None:
            break
    chunks.append(detokenizer.flush())
    return chunks, stopped_by, detokenizer.num_tokens


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(places)]


texts = st.text(alphabet="ab\né数据🫠👩\u200d\ufffd ", max_size=30)
splits = st.lists(st.integers(0, 200), max_size=20)


@calm
@given(text=texts, cuts=splits)
def test_any_split_of_any_text_joins_to_the_text(text, cuts):
    chunks, stopped_by, _ = stream(BYTES, split(byte_ids(text), cuts), Params())
    assert "".join(chunks) == text
    assert stopped_by is None


@calm
@given(ids=st.lists(st.integers(0, 511), max_size=40), cuts=splits, skip=st.booleans())
def test_any_tokens_give_what_decoding_them_whole_gives(ids, cuts, skip):
    chunks, *_ = stream(BYTES, split(ids, cuts), Params(skip_special_tokens=skip))
    assert "".join(chunks) == BYTES.decode(ids, skip)
    assert "".join(chunks) == BYTES.raw.decode(ids, skip_special_tokens=skip)


@calm
@given(ids=st.lists(st.integers(0, PIECES.vocab_size - 1), max_size=30), cuts=splits)
def test_sentencepiece_streams_equal_the_whole(ids, cuts):
    chunks, *_ = stream(PIECES, split(ids, cuts), Params(), prompt=[])
    assert "".join(chunks) == PIECES.decode(ids)


def first_stop(text: str, stops: tuple[str, ...], from_end: int) -> tuple[int, str] | None:
    """Where the first stop string is complete, by trying every end: (start, stop)."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if end > from_end and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@settings(calm, max_examples=300)
@given(
    text=st.text(alphabet="abé", max_size=20),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=splits,
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
)
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(
    text, stops, cuts, min_tokens, include
):
    ids = byte_ids(text)
    params = Params(tuple(stops), min_tokens, include_stop_str_in_output=include)
    chunks, stopped_by, num_tokens = stream(BYTES, split(ids, cuts), params)
    passed_over = BYTES.decode(ids[:min_tokens]).rstrip("\ufffd")
    found = first_stop(text, tuple(stops), len(passed_over))
    if found is None:
        assert stopped_by is None
        assert "".join(chunks) == text
        return
    start, stop = found
    assert stopped_by == stop
    assert "".join(chunks) == text[: start + len(stop) * include]
    assert num_tokens == len(text[: start + len(stop)].encode())


def test_no_chunk_shows_the_beginning_of_a_stop_string():
    chunks, stopped_by, _ = stream(BYTES, [[i] for i in byte_ids("DEFGHI")], Params(("FGH",)))
    assert chunks == ["D", "E", "", "", "", ""]
    assert stopped_by == "FGH"


def test_held_text_is_shown_when_it_did_not_become_a_stop_string():
    chunks, stopped_by, _ = stream(BYTES, [[i] for i in byte_ids("FGXF")], Params(("FGH",)))
    assert chunks == ["", "", "FGX", "", "F"]
    assert stopped_by is None


def test_no_chunk_shows_a_part_of_a_character():
    chunks, *_ = stream(BYTES, [[i] for i in byte_ids("🫠y")], Params())
    assert chunks == ["", "", "", "🫠", "y", ""]


def test_a_character_that_stays_incomplete_shows_as_one_mark():
    chunks, *_ = stream(BYTES, [[i] for i in byte_ids("🫠")[:3]], Params())
    assert chunks == ["", "", "", "\ufffd"]


def test_stop_strings_before_min_tokens_do_not_count():
    ids = [[i] for i in byte_ids("DEFGHIJK")]
    assert stream(BYTES, ids, Params(("E",), min_tokens=5))[1] is None
    chunks, stopped_by, _ = stream(BYTES, ids, Params(("J",), min_tokens=5))
    assert ("".join(chunks), stopped_by) == ("DEFGHI", "J")


def test_a_silent_last_token_counts_but_adds_no_text():
    for stop in ((), ("zz",)):
        detokenizer = Detokenizer(BYTES, PROMPT, Params(stop, skip_special_tokens=False))
        assert detokenizer.push([*byte_ids("AB"), 257], silent_last=True) == ("AB", None)
        assert detokenizer.num_tokens == 3
        assert detokenizer.flush() == ""


def test_a_continuation_keeps_its_first_space():
    ids = PIECES.encode("a", add_special_tokens=False)
    assert "".join(stream(PIECES, [ids], Params(), prompt=[5])[0]) == " a"
    assert "".join(stream(PIECES, [ids], Params(), prompt=[])[0]) == "a"


@pytest.mark.parametrize("stop", [(), (" zqj", "\n\n\n\n")])
def test_the_reference_outputs_stream_to_their_texts(smollm2, stop):
    for item in reference_items("smollm2_greedy.json"):
        params = Params(stop, skip_special_tokens=False)
        pieces = [[i] for i in item["output_ids"]]
        chunks, *_ = stream(smollm2, pieces, params, item["prompt_ids"])
        assert "".join(chunks) == item["output_text"]
