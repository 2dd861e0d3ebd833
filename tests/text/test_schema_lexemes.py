"""Schemas whose parts begin alike: llguidance's lexer and our network must take the same texts."""

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask

from jaxpaged.core.structured import StructuredOutputsParams
from jaxpaged.errors import RequestError
from jaxpaged.text.grammar import CompiledGrammar, Grammars
from jaxpaged.text.grammar_matcher import GrammarMatcher
from jaxpaged.text.grammars.expressions import Call, Concat, Grammar, Text, without_dead_ends
from tests.support.grammars import PLENTY, WORDS, answer, token_ids
from tests.support.models import EOS, VOCAB, byte_ids
from tests.support.schemas import check_json
from tests.support.tangled_schemas import tangled_schema

INTEGER, OPEN = {"type": "integer"}, {}


@pytest.fixture(scope="module")
def grammars(byte_tokens) -> Grammars:
    return Grammars(byte_tokens, VOCAB)


def compiled(grammars: Grammars, schema: Any, **fields: Any) -> CompiledGrammar:
    return grammars.compile(StructuredOutputsParams(json=schema, **fields))


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """Both automata agree in every mask on the way, and take `text` or not."""
    matcher, endings = GrammarMatcher(grammar), grammar.endings
    assert endings is not None
    place, mask = endings.start, np.zeros((1, WORDS), np.uint32)
    for number, token in enumerate([*byte_ids(text), EOS]):
        fill_next_token_bitmask(matcher.ll, mask.view(np.int32))
        ours = endings.mask(place, PLENTY)
        np.testing.assert_array_equal(mask[0], ours, err_msg=f"after {text[:number]}")
        if token not in token_ids(ours):
            return False
        if token != EOS:
            assert matcher.accept(token)
            place = endings.advance(place, grammar.vocabulary.tree.bytes_of(token))
    return True


def object_of(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # a constant, or an object that is one lexeme, beside one that calls rules
        ({"anyOf": [{"enum": [{"k": [1, "two"]}]},
                    object_of("n", x={"enum": [1, True, {}]}, n={"type": "number"})
                    | {"additionalProperties": INTEGER}]}, '{"n":1,"k":1}'),
        ({"anyOf": [{"const": {"k": 1}}, OPEN]}, '{"k":1,"l":2}'),
        ({"anyOf": [{"const": [1, "two"]}, {"type": "array", "items": OPEN}]}, "[1,true]"),
        ({"anyOf": [object_of("t x", t={"type": "string"}, x=INTEGER),
                    object_of("t y", t={"const": "a"}, y=OPEN)]}, '{"t":"a","y":[{}]}'),
        ({"anyOf": [object_of("t", t={"const": "a"}, x=INTEGER),
                    object_of("t y", t={"const": "ab"}, y=OPEN)]}, '{"t":"ab","y":null}'),
        # the same behind references, in items, in prefixes and in additional properties
        ({"$defs": {"a": object_of("t", t=INTEGER), "b": object_of("t u", t=INTEGER, u=OPEN)},
          "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, '{"t":1,"u":2}'),
        ({"type": "array",
          "prefixItems": [{"anyOf": [{"const": {"a": {"b": 1}}}, object_of(a=OPEN)]}],
          "items": {"anyOf": [{"const": [[]]}, {"type": "array"}]}},
         '[{"a":{"b":2}},[[],1]]'),
        ({"type": "object",
          "additionalProperties": {"anyOf": [{"const": {"a": 12}},
                                             object_of("a b", a=INTEGER, b=OPEN)]}},
         '{"x":{"a":12,"b":{}}}'),
        # members that may be left out, before one that calls rules
        (object_of("n", n=INTEGER, a=INTEGER, c=INTEGER, meta=OPEN), '{"n":1,"a":1,"meta":1}'),
        (object_of("n", n=INTEGER, a=INTEGER, c=INTEGER,
                   kids={"type": "array", "items": {"$ref": "#"}}),
         '{"n":1,"a":1,"kids":[{"n":2,"kids":[]}]}'),
        ({"type": "array", "prefixItems": [INTEGER, INTEGER, OPEN]}, "[1,1,{}]"),
    ],
)  # fmt: skip
def test_what_begins_alike_stays_possible(grammars, schema, text):
    check_json(text, schema)
    for spaced in (text, text.replace(",", ", ").replace('{"', '{\n  "')):
        assert takes(compiled(grammars, schema), spaced)


def check_tangled(grammars: Grammars, seed: int, more_tokens: Sequence[int]) -> bool:
    """Answers of few tokens are whole; False where the schema is not served."""
    schema = tangled_schema(random.Random(seed))
    try:
        grammar = compiled(grammars, schema)
    except RequestError:
        return False
    rng = np.random.default_rng(seed)
    assert grammar.shortest is not None
    for more in more_tokens:
        data = answer(grammars, grammar, grammar.shortest + more, rng)
        assert data is not None, f"{schema} with {more} more"
        check_json(data, schema)
        assert takes(grammar, data.decode())
    return True


@pytest.mark.parametrize("seed", range(12))
def test_tangled_schemas_are_met_by_the_fewest_tokens(grammars, seed):
    check_tangled(grammars, seed, (0, 1, 6, 60))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_a_thousand_tangled_schemas_are_met_at_every_budget(grammars, first):
    served = [check_tangled(grammars, seed, range(7)) for seed in range(first, first + 100)]
    assert sum(served) > 70


def test_ambiguity_does_not_double_with_every_bracket(grammars):
    either = {"type": "array", "items": {"$ref": "#"}}
    schema = {"anyOf": [either, {**either, "maxItems": 3}, INTEGER]}
    assert takes(compiled(grammars, schema), 30 * "[" + "1" + 30 * "]")


def test_no_way_leads_to_where_nothing_ends(grammars):
    endless = object_of("next", next={"$ref": "#/$defs/endless"})
    schema = {
        "$defs": {"endless": endless},
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/endless"}, {"type": "null"}]},
        "prefixItems": [INTEGER, {"type": "array", "items": {"$ref": "#/$defs/endless"}}],
    }
    grammar = compiled(grammars, schema)
    assert takes(grammar, "[1,[],null]")
    assert not takes(grammar, "[1,[{")
    assert not takes(grammar, "[1,[],{")


NOTHING = [
    False,
    {"enum": ["a"], "type": "null"},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"type": "array", "items": False, "minItems": 1},
    {"allOf": [{"const": 1}, {"const": 2}]},
    {"allOf": [{"enum": [1]}, {"enum": [2]}]},
    {"allOf": [{"type": "string"}, False]},
    {"anyOf": [False, {"$ref": "#/$defs/nothing"}]},
    object_of("a", a=False),
    object_of("a", a={"$ref": "#/$defs/nothing"}),
]


@pytest.mark.parametrize("nothing", NOTHING)
def test_a_branch_that_nothing_fits_leaves_the_others(grammars, nothing):
    defs = {"$defs": {"nothing": object_of("n", n=False)}}
    grammar = compiled(grammars, defs | {"anyOf": [nothing, {"type": "null"}, nothing]})
    assert takes(grammar, "null")
    assert not takes(grammar, '"a"')
    branch = {"anyOf": [{"type": "null"}, {"type": "boolean"}]}
    assert takes(compiled(grammars, defs | {"type": "null"} | branch), "null")
    members = object_of("a", a=INTEGER, b=nothing, c={"type": "array", "items": nothing})
    grammar = compiled(grammars, defs | members)
    assert takes(grammar, '{"a":1,"c":[]}')
    assert not takes(grammar, '{"a":1,"b":')
    with pytest.raises(RequestError):
        compiled(grammars, defs | {"anyOf": [nothing, nothing]})


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ({"required": "x"}, {"required": 3}),
        ({"minimum": "x"}, {"minimum": 3}),
        ({"type": [["x"]]}, {"type": "null"}),
        ({"properties": []}, {"properties": {"x": {}}}),
        ({"properties": {"x": []}}, {"properties": {"x": {"type": "null"}}}),
        ({"allOf": 1}, {"allOf": 2}),
        ({"enum": 1}, {"enum": [1]}),
    ],
)
@pytest.mark.parametrize("keyword", ["allOf", "oneOf"])
def test_what_is_no_schema_cannot_be_joined(grammars, keyword, one, another):
    with pytest.raises(RequestError):
        compiled(grammars, {keyword: [one, another]})


def test_a_property_that_may_be_anything_joins_any_other(grammars):
    several = [{"properties": {"a": True}}, {"properties": {"a": INTEGER}, "required": ["a"]}]
    for parts in (several, several[::-1]):
        grammar = compiled(grammars, {"allOf": [{"type": "object"}, *parts]})
        assert takes(grammar, '{"a":1}')
        assert not takes(grammar, '{"a":"')


def test_a_long_chain_of_rules_is_followed_once():
    chain = {f"t{i + 1}": Concat((Text("x"), Call(f"t{i}"))) for i in range(3000)}
    start = time.monotonic()
    without_dead_ends(Grammar(Call("t3000"), {"t0": Text(""), **chain}))
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMaximum": 0}, ["-1", "-0.05", "-0.0001"], ["0", "-0", "-0.0", "1"]),
        ({"exclusiveMinimum": 0}, ["1", "0.05", "0.00010", "12.5"], ["0", "0.0", "-1", "0.000"]),
        ({"minimum": 0.25, "exclusiveMaximum": 3}, ["0.25", "0.250001", "2.99"], ["0.249", "3.0"]),
        ({"maximum": 99.95100000000001}, ["-12345.678", "99.951", "99.95"], ["99.952", "100"]),
        ({"minimum": -1.5, "maximum": 1}, ["-1.5", "-1.49", "-0", "1.0"], ["-1.51", "1.01", "2"]),
        ({"minimum": 0, "multipleOf": 0.01}, ["0", "8.29", "0.1"], ["8.291", "-0.01"]),
    ],
)
def test_numbers_between_bounds(grammars, bounds, inside, outside):
    grammar = compiled(grammars, {"type": "number", **bounds})
    assert grammar.endings is not None
    assert len(grammar.endings.network.empty) < 1000
    for text in inside:
        assert takes(grammar, text), text
    for text in outside:
        assert not takes(grammar, text), text


def test_white_space_is_what_json_takes_for_it(grammars):
    grammar = compiled(grammars, {"const": [1, 2]}, whitespace_pattern=r"\s{0,3}")
    assert takes(grammar, "[ 1,\t\r\n2]")
    assert not takes(grammar, "[\f1,2]")
    assert not takes(compiled(grammars, {"const": [1]}, whitespace_pattern="x?"), "[x1]")
    with pytest.raises(RequestError, match="whitespace_pattern"):
        compiled(grammars, {"const": [1]}, whitespace_pattern="x| x")


def test_no_object_without_the_members_that_it_must_have(grammars):
    schema = {"type": "object", "minProperties": 1, "maxProperties": 0}
    with pytest.raises(RequestError, match="minProperties"):
        compiled(grammars, schema)


def test_a_schema_of_remarks_leaves_the_value_open(grammars):
    grammar = compiled(grammars, object_of("a", a={"title": "Any"}))
    assert takes(grammar, '{"a":[1,{"b":"c"}]}')


def test_a_reference_inside_one_all_of_may_go_round(grammars):
    node = object_of("kids", kids={"type": "array", "items": {"allOf": [{"$ref": "#"}]}})
    assert takes(compiled(grammars, node), json.dumps({"kids": [{"kids": []}]}))
