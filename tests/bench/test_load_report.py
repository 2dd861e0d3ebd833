import json

import pytest

from jaxpaged.bench.load_report import Answer, parse, summary
from jaxpaged.bench.serve import stand_in_tokenizer
from jaxpaged.bench.workloads import WorkItem


def event(**chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text, finish_reason=None):
    return event(choices=[{"text": text, "finish_reason": finish_reason}])


USAGE = event(choices=[], usage={"prompt_tokens": 4, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def answered(*reads, asked=3, start=10.0):
    answer = Answer(asked, start, start, end=reads[-1][0] if reads else start, reads=list(reads))
    parse(answer)
    return answer


def test_tokens_are_timed_by_the_read_that_completed_their_event():
    first = token("a")
    answer = answered(
        (10.5, first[:5]),
        (11.0, first[5:] + token("")),
        (12.0, token("c", "length") + USAGE + DONE),
    )
    assert answer.error is None
    assert answer.token_times == [11.0, 11.0, 12.0]
    assert (answer.text_chunks, answer.completion_tokens) == (2, 3)


@pytest.mark.parametrize(
    ("reads", "told"),
    [
        ([(11.0, token("a"))], "without a finish_reason"),
        ([(11.0, b"data: {oops}\n\n")], "unreadable answer"),
        ([(11.0, event(error={"message": "no room"}))], "no room"),
        ([], "without a finish_reason"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(reads, told):
    assert told in answered(*reads).error


def test_a_load_counts_what_failed_was_short_or_never_sent():
    whole = [(11.0, token("a")), (12.0, token("b")), (14.0, token("c", "length") + USAGE)]
    good, short = answered(*whole), answered(*whole, asked=4)
    bad = answered((11.0, event(error="x")))
    line = summary([WorkItem([1], 3)] * 4, [good, short, bad], [], is_open=False)
    assert (line["n"], line["ok"], line["failed"], line["length_mismatch"]) == (4, 2, 2, 1)
    assert line["errors"]["not sent before --timeout ran out"] == 1
    assert (line["seconds"], line["output_tok_per_s"]) == (4.0, 1.5)
    assert line["ttft_ms"]["p50"] == 1000
    assert line["itl_ms"] == {"p50": 1500, "p99": pytest.approx(2000), "mean": 1500}
    assert line["tpot_ms"]["p50"] == 1500


def test_the_stand_in_tokenizer_has_text_for_every_id():
    tokenizer = stand_in_tokenizer(2000)
    assert tokenizer.get_vocab_size() == 2000
    texts = [tokenizer.decode([i]) for i in range(256, 2000)]
    assert len(set(texts)) == len(texts)
    assert all(text.isascii() and text for text in texts)
