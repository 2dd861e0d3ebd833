"""The scanner takes JSON, all of it and nothing else."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.text.json_scanner import MAX_DEPTH, JsonScanner

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(value=values, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_json_is_taken_whole_and_its_end_is_found(value, indent, ascii_only):
    text = json.dumps({"v": value}, indent=indent, ensure_ascii=ascii_only)
    for pieces in ([text + " more"], list(text)):
        scanner = JsonScanner()
        taken = [scanner.take(piece)[0] for piece in pieces]
        assert "".join(taken) == text
        assert scanner.is_complete


@settings(max_examples=50, deadline=None)
@given(text=st.text('{}[]",:\\u0 1-.eE+truefalsn\n', max_size=12))
def test_what_is_taken_whole_is_json(text):
    scanner = JsonScanner()
    taken, end = scanner.take("[" + text + "]")
    if scanner.is_complete and end == len(text) + 2:
        json.loads(taken)


@pytest.mark.parametrize(
    "text",
    ["[01]", "[1.]", "[-]", "[1e]", "[.5]", "[tru]", "[1,]", "[,1]", '{"a"}', '{"a":}', "{1:2}",
     '{"a":1,}', "[1}", '{"a":1]', r'["\x"]', r'["\u12g4"]', "[+1]", "[NaN]", "['a']"],
)  # fmt: skip
def test_what_is_no_json_is_noticed(text):
    scanner = JsonScanner()
    _, end = scanner.take(text)
    assert scanner.is_broken
    assert end < len(text)


def test_line_breaks_in_strings_are_escaped():
    taken, _ = JsonScanner().take('["a\nb\tc"]')
    assert json.loads(taken) == ["a\nb\tc"]


@pytest.mark.parametrize("text", ["[" * (MAX_DEPTH + 1), "[" + "1" * 1000 + "]"])
def test_what_readers_cannot_hold_is_refused(text):
    scanner = JsonScanner()
    scanner.take(text)
    assert scanner.is_broken
