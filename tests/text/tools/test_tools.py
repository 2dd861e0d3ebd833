"""Tool calls in text: the same from any pieces, never a fault, never a broken prefix."""

import json
import random
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged.config.settings import ModelSettings
from jaxpaged.errors import ConfigError
from jaxpaged.text.answer_parts import AnswerPart, CallArguments, CallStart, Content, merged
from jaxpaged.text.json_scanner import JsonScanner
from jaxpaged.text.tools import FORMATS, ToolParser, read_named, read_required

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "where": {"anyOf": [{"type": "object"}, {"type": "array"}]},
        },
    },
    "stop": {},
}
READINGS = FORMATS | {"required": read_required, "named": read_named("weather")}


def parse(name: str, pieces: list[str], *, parallel: bool = True) -> list[AnswerPart]:
    """The joined parts, the ids of calls made equal."""
    parser = ToolParser(READINGS[name], TOOLS, parallel=parallel)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    parts = [p._replace(call_id="") if isinstance(p, CallStart) else p for p in parts]
    return merged(parts)


def content(parts: list[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def calls(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    """(name, arguments) of every call."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            assert part.place == len(found)
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            name, text = found[part.place]
            found[part.place] = (name, text + part.text)
    return found


WELL_FORMED = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
     [("weather", '{"city": "Köln"}')]),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {"b": 2}]}, "name": "x"}</tool_call>\n'
     '<tool_call>{"name": "stop"}</tool_call>', [("x", '{"a": [1, {"b": 2}]}'), ("stop", "{}")]),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>',
     [("x", '{"a": "b"}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "x", "arguments": null}', [("x", "{}")]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1}</tool_call>', [("x", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "1\n2"}}}',
     [("x", '{"a": "1\\u000a2"}')]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Köln"}}',
     [("weather", '{"city": "Köln"}')]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "stop", "parameters": {}}; '
     '{"name": "weather", "parameters": {"days": 3}}',
     [("stop", "{}"), ("weather", '{"days": 3}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"k": "v"}}, {"name": "b", '
     '"arguments": {}}]', [("a", '{"k": "v"}'), ("b", "{}")]),
    ("mistral", '[TOOL_CALLS]a{"k": "v"}[TOOL_CALLS]b[ARGS]{}', [("a", '{"k": "v"}'), ("b", "{}")]),
    ("mistral", '[TOOL_CALLS]a.b[CALL_ID]123456789[ARGS]{"k": 1}', [("a.b", '{"k": 1}')]),
    ("qwen3", "<tool_call>\n<function=weather>\n<parameter=city>\nSankt \"P\"\n2\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     [("weather", '{"city": "Sankt \\"P\\"\\n2", "days": 3}')]),
    ("qwen3_coder", "<function=stop>\n</function><tool_call><function=stop></function></tool_call>",
     [("stop", "{}"), ("stop", "{}")]),
    ("qwen3_xml", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', [("stop", "{}")]),
    ("pythonic", "[weather(city='it\\'s', days=3), stop()]",
     [("weather", '{"city": "it\'s", "days": 3}'), ("stop", "{}")]),
    ("pythonic", '[weather(where={"a": [1, -2.5, (True, None)], "b": "\\u00e9" "f"})]',
     [("weather", '{"where": {"a": [1, -2.5, [true, null]], "b": "éf"}}')]),
    ("required", '[{"name": "stop", "parameters": {}}, {"name": "x", "parameters": {"a": 1}}]',
     [("stop", "{}"), ("x", '{"a": 1}')]),
    ("named", '{"city": "A", "days": 1}', [("weather", '{"city": "A", "days": 1}')]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "want"), WELL_FORMED)
def test_well_formed_calls_are_read_and_leave_no_content(name, text, want):
    parts = parse(name, [text])
    assert calls(parts) == want
    assert content(parts) == ""
    for _, arguments in want:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("name", "text", "want"), WELL_FORMED)
def test_every_way_to_cut_a_call_in_two_gives_the_same(name, text, want):
    whole = parse(name, [text])
    assert parse(name, list(text)) == whole
    for place in range(len(text)):
        assert parse(name, [text[:place], text[place:]]) == whole


MALFORMED = [
    ("hermes", "<tool_call>{oops}</tool_call>"),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", " no call <tool_"),
    ("hermes", '{"name": "stop", "arguments": {}}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"answer": [1, 2]} and more'),
    ("llama3_json", '<|python_tag|>print("x")'),
    ("mistral", "[TOOL_CALLS] [oops]"),
    ("mistral", "[TOOL_CALLS]two words{}"),
    ("qwen3", "<function=weather><par"),
    ("qwen3", "<tool_call>\n<function=weather>\n<parameter=days>\n3"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[weather(city=__import__('os').system('true'))]"),
    ("pythonic", "[weather(days=1, city=f())]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[weather(days=" + "[" * 500 + "]" * 500 + ")]"),
    ("required", "no list"),
    ("named", "[1]"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_malformed_calls_are_content_word_for_word(name, text):
    for pieces in ([text], list(text)):
        parts = parse(name, pieces)
        assert calls(parts) == []
        assert content(parts) == text


@pytest.mark.parametrize(
    ("name", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1, oops}}', '{"a": 1, ', "oops}}"),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "cut sh', '{"a": "cut sh', ""),
        ("qwen3", "<function=stop><parameter=a>\nx\ny", '{"a": "x\\ny', ""),
    ],
)
def test_a_call_that_breaks_off_keeps_what_was_told(name, text, arguments, rest):
    for pieces in ([text], list(text)):
        parts = parse(name, pieces)
        assert [call[1] for call in calls(parts)] == [arguments]
        assert content(parts) == rest


def test_words_round_calls_stay_and_space_goes():
    call = '<tool_call>{"name": "stop"}</tool_call>'
    parts = parse("hermes", [f" I will. \n\n{call}\n{call}\nDone. \n"])
    assert content(parts) == " I will.Done. \n"
    assert len(calls(parts)) == 2


def test_a_broken_call_does_not_hide_the_next():
    good = '<tool_call>{"name": "stop"}</tool_call>'
    parts = parse("hermes", [f'<tool_call>{{"name": {good}'])
    assert calls(parts) == [("stop", "{}")]
    assert content(parts) == '<tool_call>{"name":'


def test_without_parallel_calls_only_the_first_counts():
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
    assert calls(parse("mistral", [text], parallel=False)) == [("a", "{}")]


@pytest.mark.parametrize(
    ("key", "text", "want"),
    [
        ("days", "3", 3), ("days", "3.5", "3.5"), ("days", "true", "true"), ("days", "x", "x"),
        ("exact", "True", True), ("exact", "none", None), ("exact", "1", "1"),
        ("where", '{"a": [1]}', {"a": [1]}), ("where", "[]", []), ("where", "7", "7"),
        ("where", "[" * 5000, "[" * 5000), ("city", "3", "3"), ("city", "null", "null"),
        ("city", "a < b\n", "a < b\n"), ("other", "3", "3"), ("days", "1e999", "1e999"),
    ],
)  # fmt: skip
def test_a_bare_value_is_what_the_schema_says(key, text, want):
    source = f"<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    ((_, arguments),) = calls(parse("qwen3", [source]))
    assert json.loads(arguments) == {key: want}


def test_ids_differ_and_mistrals_have_its_form():
    call = "[TOOL_CALLS]a{}[TOOL_CALLS]b{}"
    parser = ToolParser(FORMATS["mistral"], TOOLS)
    ids = [p.call_id for p in parser.push(call) + parser.finish() if isinstance(p, CallStart)]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "weather", ',
    '"arguments": ', '"parameters": ', "weather", "(", ")", "city=", "{", "}", "[", "]", ",",
    ": ", '"', '"a"', "\\", "1", "-0.5e", "true", "null", "'", " ", "\n", ";", "é", "\U0001fae0",
    "<", "days",
]  # fmt: skip
soups = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
calls_and_soup = st.lists(
    st.one_of(soups, st.sampled_from([text for _, text, _ in WELL_FORMED])), max_size=4
).map("".join)


@pytest.mark.parametrize("name", READINGS)
@settings(max_examples=25, deadline=None)
@given(text=calls_and_soup, seed=st.integers(0, 2**32))
@example(text='<tool_call>{"name": "weather", "arguments": {"a": 1', seed=0)
def test_any_pieces_give_the_same_and_arguments_are_prefixes_of_json(name, text, seed):
    rng, pieces, place = random.Random(seed), list[str](), 0
    while place < len(text):
        size = rng.choice((1, 1, 2, 3, 8, 30))
        pieces.append(text[place : place + size])
        place += size
    whole = parse(name, [text])
    assert parse(name, pieces) == whole
    for _, arguments in calls(whole):
        scanner = JsonScanner()
        assert scanner.take(arguments) == (arguments, len(arguments))
        assert arguments[:1] == "{"
        assert not scanner.is_broken


def test_the_flag_names_every_format():
    hints = get_type_hints(ModelSettings)["tool_call_parser"]
    assert set(get_args(get_args(hints)[0])) == set(FORMATS)


def test_auto_choice_without_a_parser_is_refused_at_start():
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        ModelSettings(enable_auto_tool_choice=True)
