"""Answers to one prompt share its pages, the last one by copy, on pages full of NaN."""

import pytest

from jaxpaged.core.params import SamplingParams
from tests.support.engines import MAX_NUM_SEQS, MOST_PAGES, PAGE_SIZE, TinyEngine


def run(engine, prompt, *, num_pinned=0, **options):
    """The answers, the tokens computed for the prompt, the pages copied, the most pages held."""
    computed, copies, held = [], [], []

    def watch(plan):
        c = plan.columns
        computed.extend(q for q, s in zip(c.q_lens, c.starts, strict=True) if s < len(prompt))
        copies.extend(plan.page_copies)
        held.append(engine.scheduler.pool.num_held)

    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, **options)
    outputs = engine.generate([prompt], [params], on_plan=watch, num_pinned=num_pinned)
    answers = sorted(outputs[0].outputs, key=lambda answer: answer.index)
    return answers, sum(computed), len(copies), max(held)


@pytest.mark.parametrize("prompt_len", [2, 15, 16, 17, 31, 32, 33])
def test_every_answer_to_a_prompt_is_the_one_that_it_gets_alone(parts_r, prompt_len):
    prompt = [(5 * i) % 250 for i in range(prompt_len)]
    (alone,), _, _, _ = run(TinyEngine(parts_r), prompt, temperature=0.0)
    answers, computed, num_copies, _ = run(TinyEngine(parts_r), prompt, temperature=0.0, n=4)
    for answer in answers:
        assert answer.token_ids == alone.token_ids
        assert answer.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
    assert (computed, num_copies) == (prompt_len + 3, 0 if prompt_len % PAGE_SIZE == 1 else 3)


def test_more_answers_than_slots_find_the_prompt_when_they_are_admitted(parts_r):
    prompt = [(5 * i) % 250 for i in range(40)]
    num_answers = 2 * MAX_NUM_SEQS + 1
    options = {"temperature": 1.0, "seed": 3}
    answers, computed, _, held = run(TinyEngine(parts_r), prompt, n=num_answers, **options)
    assert len({tuple(answer.token_ids) for answer in answers}) == num_answers
    assert computed == 40 + num_answers - 1
    assert held <= 40 // PAGE_SIZE + MAX_NUM_SEQS * (1 + -(-20 // PAGE_SIZE))
    tight = TinyEngine(parts_r, num_pages=1 + 7, token_budget=8)
    stormy, _, _, _ = run(tight, prompt, n=num_answers, **options)
    assert tight.scheduler.num_preemptions
    assert [a.token_ids for a in stormy] == [a.token_ids for a in answers]


def test_answers_share_pages_though_the_prefix_cache_is_off_or_skipped(parts_r):
    prompt = [(5 * i) % 250 for i in range(40)]
    skips = {"temperature": 0.0, "n": 3, "skip_reading_prefix_cache": True}
    for engine, options in (
        (TinyEngine(parts_r, enable_prefix_caching=False), {"temperature": 0.0, "n": 3}),
        (TinyEngine(parts_r), skips),
    ):
        assert run(engine, prompt, **options)[1:3] == (42, 2)
        assert run(engine, prompt, **options)[1:3] == (42, 2)  # nothing is kept for the next


def test_prompt_logprobs_come_whole_with_several_answers(parts_r):
    prompt = [(5 * i) % 250 for i in range(20)]
    params = SamplingParams(max_tokens=2, temperature=0.0, n=3, prompt_logprobs=1)
    output = TinyEngine(parts_r).generate([prompt], [params])[0]
    places = output.prompt_logprobs or []
    assert [place is None for place in places] == [True] + [False] * 19


def test_a_warm_prefix_is_not_computed_again_and_stays_when_all_else_goes(parts_r):
    engine = TinyEngine(parts_r, num_pages=MOST_PAGES)
    prompt = [(5 * i) % 250 for i in range(40)]
    cold = run(TinyEngine(parts_r), prompt, temperature=0.0)
    prefix = engine.llm.warm_prefix(prompt)
    assert (prefix.num_tokens, engine.llm.warm_prefixes()) == (32, [prefix])
    pool = engine.scheduler.pool
    pool.give_back(pool.take(pool.num_free))
    answers, computed, _, _ = run(engine, prompt, num_pinned=2, temperature=0.0)
    assert (answers[0].token_ids, computed) == (cold[0][0].token_ids, 8)
    assert engine.llm.drop_prefix(prefix.prefix_id)
    assert (pool.num_held, engine.llm.drop_prefix(prefix.prefix_id)) == (0, False)
