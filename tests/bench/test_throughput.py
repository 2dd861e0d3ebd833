import time

from benchmarks.host_loop import VOCAB, make_llm
from jaxpaged.bench.throughput import run_once
from jaxpaged.bench.workloads import Workload, build
from jaxpaged.core.params import OutputKind
from jaxpaged.text.tokenizer import ids_only_tokenizer


def test_a_run_waits_for_whole_answers_and_sees_when_the_first_token_came():
    llm, kinds = make_llm(2, ids_only_tokenizer(), VOCAB), set()

    def watch(plan):
        kinds.update(seq.request.params.output_kind for seq in plan.columns.seqs)
        time.sleep(0.005)

    (item,) = build(Workload(1, (9, 9), (40, 40), 0), VOCAB)
    run = run_once(llm, [item], watch)
    assert kinds == {OutputKind.FINAL_ONLY}
    assert [cost.num_tokens for cost in run.costs] == [9] + [1] * 39
    assert 0.005 < run.first_token_s < run.seconds / 2
