"""Where all answers are told at the end, the longest ones begin first."""

import math

import pytest

from benchmarks.host_loop import PAGE_SIZE, VOCAB, make_llm
from jaxpaged.bench.throughput import run_once
from jaxpaged.bench.workloads import WorkItem
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.engine import order
from jaxpaged.engine.order import longest_first
from jaxpaged.text.tokenizer import ids_only_tokenizer


def asks(max_tokens, **fields):
    fields = {"temperature": 0.0, "detokenize": False, "ignore_eos": True} | fields
    return SamplingParams(max_tokens=max_tokens, output_kind=OutputKind.FINAL_ONLY, **fields)


def watched(num_rows):
    """An LLM, and the sequences in the order of their first rows."""
    llm, begun = make_llm(num_rows, ids_only_tokenizer(), VOCAB), []

    def watch(plan):
        begun.extend(seq for seq in plan.columns.seqs if seq not in begun)

    llm.parts.engine.steps.on_step = watch
    return llm, begun, watch


def test_the_longest_answers_begin_first_and_results_stand_as_the_prompts():
    llm, begun, _ = watched(2)
    lengths = [3, 9, 5, 9, 3]
    prompts = [[10 + i] * 4 for i in range(5)]
    outputs = llm.generate(prompts, [asks(n) for n in lengths], use_tqdm=False)
    assert [seq.token_ids[0] for seq in begun] == [11, 13, 12, 10, 14]
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_an_answer_counts_by_its_own_length_however_many_there_are():
    llm, begun, _ = watched(8)
    params = [asks(4, n=3), asks(6), asks(4)]
    outputs = llm.generate([[10, 1], [11, 1], [12, 1]], params, use_tqdm=False)
    firsts = [seq.token_ids[0] for seq in begun if not seq.choice]
    assert firsts == [11, 10, 12]
    assert [len(output.outputs) for output in outputs] == [3, 1, 1]


def test_without_a_length_the_order_of_the_prompts_stays():
    """What the context leaves of an answer says nothing: prompts of one prefix stay together."""
    inputs = make_llm(2, ids_only_tokenizer(), VOCAB).parts.inputs
    prompts = [[7] * 32, [8] * 5, [7] * 40, [9] * 9]
    asked = [asks(None), asks(4), asks(None), asks(4000)]
    jobs = [(None, inputs.request(*one)) for one in zip(prompts, asked, strict=True)]
    assert jobs[0][1].max_tokens > jobs[2][1].max_tokens
    ordered = [list(request.prompt_token_ids) for _, request in longest_first(jobs)]
    assert ordered == [prompts[0], prompts[2], prompts[3], prompts[1]]


def test_the_bench_hands_its_requests_over_as_generate_does():
    llm, begun, watch = watched(4)
    lengths = [3, 40, 20, 40]
    run = run_once(llm, [WorkItem([10 + i, 1], n) for i, n in enumerate(lengths)], watch)
    assert [seq.token_ids[0] for seq in begun] == [11, 13, 12, 10]
    assert sum(cost.num_tokens for cost in run.costs) == sum(lengths) + 4


def test_fewer_steps_are_nearly_empty():
    def steps_of(order):
        llm, _, _ = watched(4)
        steps = []
        llm.parts.engine.steps.on_step = lambda plan: steps.append(plan.num_rows)
        jobs = [
            (None, llm.parts.inputs.request([9, i], asks(n)))
            for i, n in enumerate([5] * 8 + [50] * 2)
        ]
        for _ in llm.run(order(jobs), max_inflight=len(jobs)):
            pass
        return len(steps)

    fewest = math.ceil((5 * 8 + 50 * 2) / 4)
    assert fewest < steps_of(longest_first) < 55 < steps_of(list)


def small(num_pages, **limits):
    """An LLM of 32 rows with few pages."""
    limits = {"enable_prefix_caching": False} | limits
    return make_llm(32, ids_only_tokenizer(), VOCAB, num_pages=num_pages, **limits)


def rows_of(llm, prompts, params):
    """The rows of each step."""
    rows = []
    llm.parts.engine.steps.on_step = lambda plan: rows.append(plan.num_rows)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    return rows


PROMPTS = [[10 + i] * 32 for i in range(32)]
TOO_FEW = 32 * (32 + 64) // PAGE_SIZE * 3 // 4  # pages for three quarters of all


def test_some_begin_later_so_that_all_end_sooner(monkeypatch):
    llm = small(TOO_FEW)
    rows = rows_of(llm, PROMPTS, asks(64))
    assert rows[0] < 16
    assert max(rows) == 32
    assert llm.parts.engine.scheduler.num_preemptions == 0
    monkeypatch.setattr(order, "find_stagger", lambda kinds, room: None)
    assert len(rows) < 0.8 * len(rows_of(small(TOO_FEW), PROMPTS, asks(64)))


@pytest.mark.parametrize(
    ("prompts", "params", "sizes"),
    [
        (PROMPTS, asks(64), {"num_pages": 400}),  # all fit
        (PROMPTS, asks(64, stop_token_ids=[5]), {}),
        (PROMPTS, asks(64, n=2), {}),
        (PROMPTS, [asks(40 + i) for i in range(32)], {}),  # they end one after the other
        (
            [[7] * 40] * 32,
            asks(64),
            {"enable_prefix_caching": True},
        ),  # one prefix
        (PROMPTS, asks(64), {"admission": "no-evict"}),
    ],
)
def test_otherwise_all_begin_as_early_as_may_be(prompts, params, sizes):
    llm = small(**{"num_pages": TOO_FEW} | sizes)
    most = []
    run = llm.run
    llm.run = lambda jobs, *, max_inflight: run(jobs, max_inflight=lambda: noted(max_inflight))

    def noted(max_inflight):
        most.append(max_inflight())
        return most[-1]

    rows_of(llm, prompts, params)
    assert set(most) == {len(prompts)}
