"""Grammars without a model: any token that a mask allows may be the next."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask

from jaxpaged.errors import RequestError
from jaxpaged.text.grammar import Grammars
from jaxpaged.text.grammar_matcher import GrammarMatcher, MaskFiller
from tests.support.grammars import PLENTY, WORDS, allowed_by, answer, token_ids
from tests.support.models import EOS, VOCAB, byte_ids
from tests.support.schemas import ODD_WORDS, SCHEMA_WITH_REFERENCE, check_json, random_schema


@dataclass
class Params:
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


@pytest.fixture(scope="module")
def grammars(byte_tokens) -> Grammars:
    return Grammars(byte_tokens, VOCAB)


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_closes_and_validates(grammars, seed):
    schema = random_schema(random.Random(seed))
    grammar = grammars.compile(Params(json=schema))
    assert grammar.shortest is not None
    rng = np.random.default_rng(seed)
    for more in (0, 1, 2, 5, 20, 80):
        data = answer(grammars, grammar, grammar.shortest + more, rng)
        assert data is not None, f"{schema} with {more} more"
        check_json(data, schema)


@pytest.mark.parametrize("seed", range(12))
def test_both_automata_allow_the_same_tokens(grammars, seed):
    schema = random_schema(random.Random(seed))
    grammar = grammars.compile(Params(json=schema))
    matcher, filler, endings = GrammarMatcher(grammar), MaskFiller(), grammar.endings
    assert endings is not None
    rng, ids, place = np.random.default_rng(seed), [], endings.start
    mask = np.zeros((1, WORDS), np.uint32)
    for _ in range(60):
        mask[:] = allowed_by(filler, matcher, ids, PLENTY)
        ours = endings.mask(place, PLENTY)
        if matcher.must_end:
            break
        np.testing.assert_array_equal(mask[0], ours, err_msg=f"{schema} after {ids}")
        bits = token_ids(ours)
        token = int(rng.choice(bits))
        if token == EOS:
            break
        assert matcher.accept(token)
        ids.append(token)
        place = endings.advance(place, grammars.tree.bytes_of(token))


def test_masks_kept_by_place_are_what_the_grammar_allows_there(grammars):
    schema = {"type": "array", "items": {"enum": ["a", "bc", {"k": 1}]}, "minItems": 2}
    grammar = grammars.compile(Params(json=schema))
    filler, rng = MaskFiller(), np.random.default_rng(0)
    mask, told = np.zeros((1, WORDS), np.uint32), np.zeros((1, WORDS), np.uint32)
    for _ in range(8):
        matcher, ids = GrammarMatcher(grammar), []
        while len(ids) < 60 and not matcher.must_end:
            mask[:] = allowed_by(filler, matcher, ids, PLENTY)
            fill_next_token_bitmask(matcher.ll, told.view(np.int32))
            np.testing.assert_array_equal(mask, told, err_msg=f"after {ids}")
            token = int(rng.choice(token_ids(told[0])))
            if token == EOS:
                break
            assert matcher.accept(token)
            ids.append(token)
    assert grammar.endings.num_told > 20


def test_a_mask_is_not_kept_under_a_number_that_means_another_place_by_now(grammars):
    grammar = grammars.compile(Params(json={"type": "array", "items": {"enum": ["x", "yz"]}}))
    matcher, mask = GrammarMatcher(grammar), np.ones(1, np.uint32)
    _, place = matcher.known([], PLENTY)
    matcher.tell(place, mask)
    assert matcher.known([], PLENTY) == (mask, place)
    grammar.endings._forget()  # as `forget_if_full` does while another row is looked at
    matcher.tell(place, mask)
    assert GrammarMatcher(grammar).known([], PLENTY)[0] is None


def test_no_answer_is_shorter_than_the_shortest(grammars):
    """With one byte a token it is the length of the shortest text."""
    cases = [
        (
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            '{"a":""}',
        ),
        ({"enum": ["abc", "d"]}, '"d"'),
        ({"type": "integer", "minimum": 100}, "100"),
        ({"type": "array", "items": {"const": 12}, "minItems": 3}, "[12,12,12]"),
        ({"anyOf": [{"const": "long one"}, {"type": "null"}]}, "null"),
    ]
    for schema, text in cases:
        assert grammars.compile(Params(json=schema)).shortest == len(text)
        grammar = grammars.compile(Params(json=schema))
        data = answer(grammars, grammar, len(text), np.random.default_rng(0))
        assert data is not None
        assert len(data) == len(text)


def test_recursive_schemas_close_too(grammars):
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v", "kids"],
    }
    grammar = grammars.compile(Params(json=node))
    assert grammar.shortest == len('{"v":0,"kids":[]}')
    for seed in range(10):
        data = answer(grammars, grammar, 60, np.random.default_rng(seed))
        assert data is not None
        check_json(data, node)


def test_regex_choice_and_objects(grammars):
    rng = np.random.default_rng(1)
    for params, want in [
        (Params(regex=r"\d{3}-[A-F]+(x|yy)?"), lambda text: text[3] == "-" and text[:3].isdigit()),
        (Params(choice=["yes", "no", "maybe", "nö"]), {"yes", "no", "maybe", "nö"}.__contains__),
        (Params(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    ]:
        grammar = grammars.compile(params)
        for _ in range(5):
            data = answer(grammars, grammar, 30, rng)
            assert data is not None
            assert want(data.decode())


def test_larks_and_ebnf_are_followed(grammars):
    rng = np.random.default_rng(1)
    for text in ('start: "a" | "b" start', 'root ::= "a" | "b" root'):
        grammar = grammars.compile(Params(grammar=text))
        data = answer(grammars, grammar, 1000, rng)
        assert data is not None
        assert data.strip(b"b") == b"a"


def test_tagged_parts_of_free_text_are_held_to_their_schemas(grammars):
    rng, found = np.random.default_rng(0), Counter()
    tags = [
        {
            "begin": "<f=a>",
            "schema": {"type": "integer", "maximum": 99, "minimum": 0},
            "end": "</f>",
        },
        {"begin": "<f=b>", "schema": {"enum": [True, None]}, "end": "</f>"},
        {"begin": "[x", "schema": {"enum": ["y"]}, "end": "]"},
    ]
    text = json.dumps({"structures": tags, "triggers": ["<f=", "[x"]})
    compiled = grammars.compile(Params(structural_tag=text))
    assert compiled.shortest is None
    for _ in range(12):
        matcher, ids = GrammarMatcher(compiled), list[int]()
        for token in byte_ids(rng.choice(["so <", "a <f=a>", "<f=b>", "[x", "-"])):
            assert matcher.accept(token)
            ids.append(token)
        mask = np.zeros((1, WORDS), np.uint32)
        liked = byte_ids('<f=[x</"y')
        for _ in range(60):
            mask[:] = allowed_by(MaskFiller(), matcher, ids, PLENTY, goes_on=True)
            allowed = token_ids(mask[0])
            likely = [token for token in liked if token in allowed]
            ids.append(int(rng.choice(likely if likely and rng.random() < 0.6 else allowed)))
            assert matcher.accept(ids[-1])
        data = b"".join(grammars.tree.bytes_of(i) for i in ids)
        for whole in re.findall(rb"<f=(?:a>\d\d?</f>|b>(?:true|null)</f>)|\[x\"y\"\]", data):
            found[whole[:4]] += 1
            data = data.replace(whole, b"")
        assert data.count(b"<f=") + data.count(b"[x") <= 1, data  # only the last may be open
    assert len(found) == 3, found


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"structures": [], "triggers": ["a"]}',
        '{"structures": [{"begin": "a", "end": 1, "schema": {}}], "triggers": ["a"]}',
        '{"structures": [{"begin": "b", "end": "", "schema": {}}], "triggers": ["a"]}',
        '{"structures": [{"begin": "a", "end": "", "schema": {"not": {}}}], "triggers": ["a"]}',
        '{"structures": {"begin": "a"}, "triggers": "a"}', '{"format": {"type": "any_text"}}',
    ],
)  # fmt: skip
def test_a_tag_that_cannot_be_served_is_refused(grammars, text):
    with pytest.raises(RequestError, match=r"structural_tag|not served"):
        grammars.compile(Params(structural_tag=text))


def test_escapes_behind_a_reference_stay_whole(grammars):
    grammar = grammars.compile(Params(json=SCHEMA_WITH_REFERENCE))
    seen = {
        json.loads(answer(grammars, grammar, 40, np.random.default_rng(seed)) or b"")["w"]
        for seed in range(20)
    }
    assert seen == set(ODD_WORDS)


def test_white_space_is_bounded(grammars):
    grammar = grammars.compile(Params(json={"type": "array", "items": {"type": "null"}}))
    endings = grammar.endings
    assert endings is not None
    place = endings.advance(endings.start, b"[\n" + 24 * b" ")
    assert endings.advance(place, b" ") == 0
    tight = grammars.compile(Params(json={"const": [1, 2]}, disable_any_whitespace=True))
    assert answer(grammars, tight, 50, np.random.default_rng(0)) == b"[1,2]"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (Params(json={"type": "object", "patternProperties": {}}), "patternProperties"),
        (Params(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Params(json={"not": {}}), "not"),
        (Params(json={"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "oneOf"),
        (Params(json={"$ref": "http://example.com/x"}), "$ref"),
        (Params(json={"$ref": "#"}), "refers to itself"),
        (Params(json={"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"},
                                      "minItems": 1}}, "$ref": "#/$defs/a"}), "nothing fits"),
        (Params(json={"type": "integer", "minimum": 3, "maximum": 2}), "bounds"),
        (Params(json={"type": "string", "maxLength": 10**9}), "too large"),
        (Params(json={"type": "string", "pattern": [1]}), "pattern must be text"),
        (Params(json={"type": "string", "format": [1]}), "format must be text"),
        (Params(json={"type": None, "minLength": 1}), "type is None"),
        (Params(json={"anyOf": [False, {"properties": {"a": 1}}]}), "a schema is an object"),
        (Params(json={"enum": 0, "const": 0}), "enum must be a list"),
        (Params(json='{"enum": [1e400], "const": 1}'), "infinity"),
        (Params(json=[1]), "schema"),
        (Params(json="{"), "JSON"),
        (Params(json={"enum": ["\ud800"]}), "surrogate"),
        (Params(json={"type": "object", "properties": {"\ud800": {}}}), "surrogate"),
        (Params(choice=["\ud800"]), "surrogate"),
        (Params(regex="\ud800"), "surrogate"),
        (Params(regex="(a"), "')'"),
        (Params(regex=r"(a)\1"), "not served"),
        (Params(regex="(?=a)b"), "groups"),
        (Params(regex="(((a{1,900}){1,900}){1,900}b){1,900}" * 20), "too large"),
        (Params(grammar="start: nowhere"), "grammar"),
        (Params(grammar="root ::= ("), "EBNF"),
        (Params(grammar="start: start"), "lead only back to themselves or to what nothing"),
        (Params(grammar="root ::= root"), "no answer can begin with it"),
        (Params(grammar=r"start: /[^\s\S]/"), "no answer can begin with it"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_words(grammars, params, words):
    with pytest.raises(RequestError) as caught:
        grammars.compile(params)
    assert words in str(caught.value)
    assert caught.value.param


def test_the_cache_is_bounded(byte_tokens):
    grammars = Grammars(byte_tokens, VOCAB, max_kept=8)
    first = grammars.compile(Params(choice=["first"]))
    assert grammars.compile(Params(choice=["first"])) is first
    for number in range(20):
        grammars.compile(Params(choice=[f"word {number}"]))
    assert len(grammars._kept) == 8
    assert grammars.kept(Params(choice=["first"])) is None
