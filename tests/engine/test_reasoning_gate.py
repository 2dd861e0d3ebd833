"""Reasoning before an answer that a grammar holds; any token that a mask allows may be the next."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpaged.core.params import SamplingParams
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.core.structured import ReasoningMarks, StructuredOutputsParams
from jaxpaged.engine import grammar_rows
from jaxpaged.engine.grammar_rows import GrammarRows, compile_grammar
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.errors import CapacityError, RequestError
from jaxpaged.text.grammar import NUM_WORKERS, Grammars
from jaxpaged.text.tokenizer import load_tokenizer
from tests.support.models import EOS, VOCAB, byte_ids, byte_tokenizer, write_tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
SHORTEST = len('{"n":1}')
WORDS = ["<think>", "</think>", "k>{", "x</think>{", "k>\n", "</think>x"]  # ids 261 to 266
BEGIN, END, SPLIT, CROSSES, CLEAN, ENDS = range(261, 267)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, InputProcessor]:
    """By vocabulary: bytes alone, and bytes with marks and tokens across the closing one."""
    made = {}
    for name, words in (("bytes", []), ("words", WORDS)):
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder)
        raw = byte_tokenizer()
        raw.add_tokens(words)
        raw.save(str(folder / "tokenizer.json"))
        made[name] = InputProcessor(load_tokenizer(folder), VOCAB, 512, 0, ())
    return made


def sequence(
    inputs: InputProcessor, *, is_open: bool, max_tokens: int, limit: int | None = None
) -> Sequence:
    params = SamplingParams(
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
        reasoning=ReasoningMarks("<think>", "</think>", is_open, limit),
    )
    return Sequence(0, inputs.request([1], params), 0, [1], 1)


def allowed_next(rows: GrammarRows, seq: Sequence) -> list[int]:
    columns = SimpleNamespace(seqs=[seq], samples=[True])
    plan: Any = SimpleNamespace(columns=columns)
    assert rows.is_in(plan)
    banned = np.zeros((1, VOCAB // 32), np.uint32)
    rows.fill(plan, banned)
    return np.flatnonzero(np.unpackbits(~banned[0].view(np.uint8), bitorder="little")).tolist()


def answer(inputs: InputProcessor, seq: Sequence, rng: np.random.Generator, liked: tuple) -> bytes:
    """All bytes of an answer; `liked` tokens are taken more often than others."""
    rows = GrammarRows(inputs.tokenizer)
    rows.add(seq)
    while True:
        allowed = allowed_next(rows, seq)
        likely = [token for token in liked if token in allowed]
        token = int(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
        assert token != EOS
        seq.token_ids.append(token)
        if len(seq.output_token_ids) == seq.request.max_tokens:
            seq.state, seq.finish_reason = SeqState.FINISHED, "length"
        ending = rows.take(seq, (token,))
        if ending is not None:
            assert ending.error is None, ending.error
            return b"".join(map(inputs.tokenizer.token_bytes, seq.output_token_ids))
        assert seq.finish_reason is None


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("is_open", [True, False])
def test_the_answer_after_any_reasoning_is_whole_at_any_budget(inputs, kind, is_open):
    rng, processor = np.random.default_rng(0), inputs[kind]
    closing = len(processor.tokenizer.encode("</think>", add_special_tokens=False))
    liked = (*byte_ids("</thin>"), *([SPLIT, CLEAN, END, CROSSES, ENDS] if kind == "words" else []))
    thoughts = 0
    for spare in (0, 1, 2, 3, 40, 0, 1, 7, 40, 40):
        least = SHORTEST + (closing if is_open else 0)
        seq = sequence(processor, is_open=is_open, max_tokens=least + spare)
        data = answer(processor, seq, rng, (*liked, *([BEGIN] if kind == "words" else [])))
        before, mark, text = data.rpartition(b"</think>")
        assert json.loads(text)["n"] in (1, 22)
        assert b"</think>" not in before
        thoughts += bool(mark)
        assert is_open == bool(mark) or data.startswith(b"<think>")
    assert thoughts == 10 if is_open else (thoughts > 0) == (kind == "words")


@pytest.mark.parametrize("limit", [0, 1, 9])
def test_reasoning_before_a_grammar_ends_at_its_limit(inputs, limit):
    rng, processor = np.random.default_rng(1), inputs["words"]
    for _ in range(20):
        seq = sequence(processor, is_open=True, max_tokens=400, limit=limit)
        data = answer(processor, seq, rng, (SPLIT,))
        assert json.loads(data.rpartition(b"</think>")[2])["n"] in (1, 22)
        num_thoughts = seq.output_token_ids.index(END) if END in seq.output_token_ids else 0
        assert num_thoughts <= limit


def test_a_token_in_which_the_answer_would_begin_is_not_allowed(inputs):
    seq = sequence(inputs["words"], is_open=True, max_tokens=100)
    rows = GrammarRows(inputs["words"].tokenizer)
    rows.add(seq)
    assert {SPLIT, CLEAN, END, BEGIN} <= set(allowed_next(rows, seq))
    assert not {CROSSES, ENDS, EOS} & set(allowed_next(rows, seq))
    for token in byte_ids("a</thin"):
        seq.token_ids.append(token)
        assert rows.take(seq, (token,)) is None
    after = set(allowed_next(rows, seq))
    assert CLEAN in after
    assert not {SPLIT, CROSSES, ENDS, EOS} & after


def test_an_answer_opens_reasoning_only_where_it_can_be_closed(inputs):
    for max_tokens, may in ((SHORTEST, False), (SHORTEST + 1, False), (SHORTEST + 2, True)):
        seq = sequence(inputs["words"], is_open=False, max_tokens=max_tokens)
        rows = GrammarRows(inputs["words"].tokenizer)
        rows.add(seq)
        allowed = allowed_next(rows, seq)
        assert (BEGIN in allowed) == may
        assert byte_ids("{")[0] in allowed


async def test_looking_through_the_vocabulary_is_not_a_grammars_time(inputs, monkeypatch):
    grammars, tree = Grammars(inputs["bytes"].tokenizer, VOCAB, time_limit_s=1.0), Grammars.tree
    monkeypatch.setattr(grammar_rows, "GRACE_S", 0.0)
    waits = iter([1.3])

    def slow(self):
        time.sleep(next(waits, 0))
        return tree.fget(self)

    monkeypatch.setattr(Grammars, "tree", property(slow))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    assert (await compile_grammar(grammars, params)).shortest == SHORTEST


async def test_a_grammar_that_only_waits_for_others_is_not_refused_as_too_slow(inputs, monkeypatch):
    """The server is full, which a 503 tells; what takes long by itself can never be served."""
    grammars, build = Grammars(inputs["bytes"].tokenizer, VOCAB, time_limit_s=0.3), Grammars.compile
    monkeypatch.setattr(grammar_rows, "GRACE_S", 0.3)
    begun: list[StructuredOutputsParams] = []
    first = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["first"]))
    await compile_grammar(grammars, first)  # looks through the vocabulary

    def slow(self, wanted):
        begun.append(wanted)
        time.sleep(1.0)
        return build(self, wanted)

    monkeypatch.setattr(Grammars, "compile", slow)
    wanted = [StructuredOutputsParams(choice=[str(i)]) for i in range(NUM_WORKERS + 1)]
    jobs = [compile_grammar(grammars, SamplingParams(structured_outputs=one)) for one in wanted]
    *slow_ones, waited = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(one) for one in slow_ones] == [RequestError] * NUM_WORKERS
    assert type(waited) is CapacityError
    grammars.workers.shutdown()
    choices = sorted([one.choice for one in begun])  # the workers begin in any order
    assert choices == [["0"], ["1"]], "what nobody waits for any more is not compiled"


def test_the_closing_mark_must_fit_as_well(inputs):
    with pytest.raises(RequestError, match=f"takes {SHORTEST + 8} tokens"):
        sequence(inputs["bytes"], is_open=True, max_tokens=SHORTEST + 7)
