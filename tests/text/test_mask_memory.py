from dataclasses import dataclass

import numpy as np
import pytest

from jaxpaged.core.structured import StructuredOutputsParams
from jaxpaged.text.grammar import Grammars
from jaxpaged.text.grammars.mask_memory import COUNTS, MaskMemory
from tests.support.grammars import answer
from tests.support.models import VOCAB
from tests.support.schemas import check_json


@dataclass
class User:
    num_mask_words: int = 0

    def forget_masks(self, num_left: int) -> None:
        self.num_mask_words = min(self.num_mask_words, num_left)


def add(memory: MaskMemory, user: User, num_words: int) -> None:
    user.num_mask_words += num_words
    memory.added(user, num_words)


def test_who_added_none_for_longest_loses_its_masks_first():
    memory, old, new = MaskMemory(COUNTS), User(), User()
    add(memory, old, 30)
    add(memory, new, 30)
    assert (old.num_mask_words, new.num_mask_words) == (30, 30)
    add(memory, new, 10)
    assert (old.num_mask_words, new.num_mask_words) == (0, 40)


def test_who_takes_all_the_memory_keeps_the_later_half():
    memory, user = MaskMemory(COUNTS), User()
    add(memory, user, COUNTS + 2)
    assert user.num_mask_words == COUNTS // 2 + 1


def test_who_is_gone_does_not_count():
    memory, old, new = MaskMemory(COUNTS), User(), User()
    add(memory, old, COUNTS)
    del old
    add(memory, new, COUNTS)
    assert new.num_mask_words == COUNTS


@pytest.mark.parametrize("most_words", [1, 200])
def test_grammars_that_must_forget_their_masks_at_once_allow_the_same(byte_tokens, most_words):
    grammars = Grammars(byte_tokens, VOCAB)
    schemas = [{"enum": ["a", "bc"]}, {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2}]
    compiled = [grammars.compile(StructuredOutputsParams(json=schema)) for schema in schemas]
    for grammar in compiled:
        assert grammar.endings is not None
        grammar.endings._memory = MaskMemory(most_words)
    rng = np.random.default_rng(0)
    for schema, grammar in [*zip(schemas, compiled, strict=True)] * 4:
        assert grammar.shortest is not None
        data = answer(grammars, grammar, grammar.shortest + 2, rng)
        assert data is not None
        check_json(data, schema)
