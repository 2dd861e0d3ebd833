"""Answers drawn from masks, without a model: any token that a mask allows may be the next."""

import numpy as np

from jaxpaged.text.grammar import CompiledGrammar, Grammars
from jaxpaged.text.grammar_matcher import GrammarMatcher, MaskFiller, MaskRow
from tests.support.models import EOS, VOCAB

WORDS = -(-VOCAB // 32)
PLENTY = 1 << 29


def allowed_by(
    filler: MaskFiller,
    matcher: GrammarMatcher,
    ids: list[int],
    budget: int,
    *,
    goes_on: bool = False,
) -> np.ndarray:
    """u32[1, words]: the tokens that may come next."""
    banned = np.zeros((1, WORDS), np.uint32)
    filler.ban(banned, [MaskRow(0, matcher, ids, budget, goes_on)])
    return ~banned


def token_ids(words: np.ndarray) -> np.ndarray:
    """The tokens whose bits are set."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def answer(
    grammars: Grammars, grammar: CompiledGrammar, max_tokens: int, rng: np.random.Generator
) -> bytes | None:
    """Draw tokens from the masks until the grammar or the tokens end; None where it is no whole."""
    matcher, filler = GrammarMatcher(grammar), MaskFiller()
    ids: list[int] = []
    while len(ids) < max_tokens and not matcher.must_end:
        mask = allowed_by(filler, matcher, ids, max_tokens - len(ids))
        token = int(rng.choice(token_ids(mask[0])))
        if token == EOS:
            break
        assert matcher.accept(token)
        ids.append(token)
    data = b"".join(grammars.tree.bytes_of(i) for i in ids)
    return data if matcher.can_end else None
