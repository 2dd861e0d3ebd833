"""Grammars of thousands of texts, followed without a model."""

import json
from collections import Counter

import numpy as np
import pytest

from jaxpaged.core.structured import StructuredOutputsParams as Structured
from jaxpaged.errors import RequestError
from jaxpaged.text.grammar import Grammars
from jaxpaged.text.grammar_matcher import GrammarMatcher, MaskFiller
from tests.support.grammars import PLENTY, allowed_by, answer
from tests.support.models import VOCAB, byte_ids


@pytest.fixture(scope="module")
def grammars(byte_tokens) -> Grammars:
    return Grammars(byte_tokens, VOCAB)


MANY = [f"w{number}" for number in range(3000)]


@pytest.mark.parametrize(
    "params",
    [
        Structured(choice=MANY),
        Structured(regex="|".join(MANY)),
        Structured(json={"enum": MANY}),
        Structured(json={"anyOf": [{"const": word} for word in MANY]}),
        Structured(grammar="start: " + " | ".join(f'"{word}"' for word in MANY)),
        Structured(grammar="root ::= " + " | ".join(f'"{word}"' for word in MANY)),
        Structured(grammar="start: W\nW: " + " | ".join(f'"{word}"' for word in MANY * 2)),
    ],
)
def test_an_answer_may_be_one_of_thousands_of_texts(grammars, params):
    grammar = grammars.compile(params)
    quotes = 0 if params.json is None else 2
    told, least = set(), 2 + quotes
    assert grammar.shortest in (None, least)
    for seed in range(20):
        budget = least + seed % 4 if grammar.shortest else 20
        data = answer(grammars, grammar, budget, np.random.default_rng(seed))
        assert data is not None
        told.add(json.loads(data) if quotes else data.decode())
    assert told <= set(MANY)
    assert len(told) > 8


def test_texts_that_begin_alike_end_where_each_of_them_does(grammars):
    words = ["a", "ab", "abc", "abd", "b", "é", "è", "ab"]
    grammar = grammars.compile(Structured(choice=words))
    told = Counter(
        (answer(grammars, grammar, budget, np.random.default_rng(seed)) or b"").decode()
        for seed in range(60)
        for budget in (1, 2, 3)
    )
    assert set(told) == set(words)


def test_more_ways_to_go_on_than_are_followed_are_told_when_they_are_seen(grammars):
    ways = " | ".join(f'"w{number}"' for number in range(6000))
    for first in (f"start: {ways}", f"start: ({ways})*"):
        with pytest.raises(RequestError, match=r"too many ways at once \(over 5000 alternatives"):
            grammars.compile(Structured(grammar=first))
    grammar = grammars.compile(Structured(grammar=f'start: "x" ("y" | "z") r\nr: {ways}'))
    later = GrammarMatcher(grammar)
    taken = [later.accept(token) for token in byte_ids("xyw")]
    assert taken[0]
    assert not taken[-1]
    assert later.failure is not None
    assert later.failure.startswith("the grammar cannot be followed, it may go on in too many ways")
    other = GrammarMatcher(grammars.compile(Structured(grammar='start: "a" "b"')))
    assert not other.accept(byte_ids("x")[0])
    assert other.failure is None


def test_patterns_that_are_too_much_to_follow_are_told_so(grammars):
    patterns = " | ".join(f"/[a-z]{{1,{1 + n % 200}}}x{n}[^0-9]*/" for n in range(2000))
    matcher = GrammarMatcher(grammars.compile(Structured(grammar=f"start: {patterns}")))
    ids = byte_ids("a")
    assert matcher.accept(ids[0])
    allowed_by(MaskFiller(), matcher, ids, PLENTY)
    assert matcher.failure == (
        "after 1 tokens of the answer the grammar lets none follow, what may come takes too long "
        "to find (many patterns are open at once): correct it"
    )
