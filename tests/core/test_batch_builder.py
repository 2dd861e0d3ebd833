import numpy as np
import pytest

from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import Bucket
from jaxpaged.core.packing import PackedLayout
from jaxpaged.core.params import SamplingParams
from jaxpaged.errors import InvariantError
from tests.core.fake_device import VOCAB, add, commit, make_scheduler, make_sequence, prompt

PAGES_PER_SEQ = 16
SPARE = 4  # slot of padding rows


def make_builder(processors=None):
    return BatchBuilder(PAGES_PER_SEQ, 4, 4, VOCAB, processors or {})


def build(plan, bucket, builder=None):
    batch = (builder or make_builder()).build(plan, bucket)
    assert batch.bucket == bucket
    return PackedLayout(bucket, PAGES_PER_SEQ, VOCAB).views(batch)


def mixed(sampler, num_tokens=16, num_seqs=4):
    return Bucket("mixed", sampler, num_tokens, num_seqs)


def test_a_mixed_step_is_laid_end_to_end_and_padded():
    scheduler = make_scheduler()
    first, second = add(scheduler, make_sequence(0, [7]), make_sequence(1, prompt(10, 5)))
    plans = [scheduler.schedule()]
    (third,) = add(scheduler, make_sequence(2, prompt(20, 6)))
    plans.append(scheduler.schedule())
    views = build(plans[1], mixed("greedy"))
    assert views["token_ids"].tolist() == [0, 0, *range(20, 26)] + [0] * 8
    assert views["from_last"].tolist() == [1, 1] + [0] * 14
    assert views["positions"].tolist() == [1, 5, *range(6)] + [0] * 8
    places = [(first, 1), (second, 5), *((third, i) for i in range(6))]
    slots = [seq.page_ids[place // 4] * 4 + place % 4 for seq, place in places]
    assert views["slot_mapping"].tolist() == slots + [0] * 8
    table = [
        seq.page_ids + [0] * (PAGES_PER_SEQ - len(seq.page_ids)) for seq in (first, second, third)
    ]
    assert views["page_table"].tolist() == [*table, [0] * PAGES_PER_SEQ]
    assert views["kv_lens"].tolist() == [2, 6, 6, 0]
    assert views["cu_q_lens"].tolist() == [0, 1, 2, 8, 8]
    assert views["seq_slots"].tolist() == [0, 1, 2, SPARE]
    assert views["logit_rows"].tolist() == [0, 1, 7, 0]
    assert views["sample_slots"].tolist() == [0, 1, 2, SPARE]


def test_a_decode_takes_tokens_that_were_read_from_the_host():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0, [7]), make_sequence(1, [8, 9]))
    commit(scheduler, scheduler.schedule(), 33)
    views = build(scheduler.schedule(), Bucket("decode", "greedy", 4, 4))
    assert views["token_ids"].tolist() == [33, 33, 0, 0]
    assert not views["from_last"].any()
    assert views["positions"].tolist() == [1, 2, 0, 0]
    assert views["cu_q_lens"].tolist() == [0, 1, 2, 2, 2]


def test_sampling_fields_follow_their_rows_and_padding_is_neutral():
    scheduler = make_scheduler()
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25)
    add(
        scheduler,
        make_sequence(0, [7]),
        make_sequence(1, [8, 9], params=params, choice=2, seed=(5 << 32) + 6),
        make_sequence(2, [8], params=SamplingParams(temperature=1e-7), seed=2**64 - 1),
    )
    views = build(scheduler.schedule(), mixed("sampled"))
    assert views["temperature"].tolist() == [0, 0.5, 0, 0]
    assert views["top_k"].tolist() == [0, 3, 0, 0]
    assert views["top_p"].tolist() == [1, 0.75, 1, 1]
    assert views["min_p"].tolist() == [0, 0.25, 0, 0]
    assert views["seed"].tolist() == [[0, 0], [6, 5], [2**32 - 1, 2**32 - 1], [0, 0]]
    assert views["choice"].tolist() == [0, 2, 0, 0]
    assert views["position"].tolist() == [1, 2, 1, 0]


def test_edits_stand_in_the_rows_that_sample():
    scheduler = make_scheduler(max_num_batched_tokens=7)
    penalties = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    edits = SamplingParams(
        logit_bias={3: 1.5},
        allowed_token_ids=[0, 33],
        logits_processors=["b", "c", "b"],
        max_tokens=4,
    )
    add(
        scheduler,
        make_sequence(0, [7], params=penalties),
        make_sequence(1, [8], params=edits),
        make_sequence(2, prompt(0, 9), params=edits),
    )
    plan = scheduler.schedule()
    assert [row.samples for row in plan.rows] == [True, True, False]
    views = build(plan, mixed("full"), make_builder({"a": 0, "b": 1, "c": 3}))
    assert views["presence_penalty"].tolist() == [1, 0, 0, 0]
    assert views["frequency_penalty"].tolist() == [0.5, 0, 0, 0]
    assert views["repetition_penalty"].tolist() == [2, 1, 1, 1]
    assert views["counts_row"].tolist() == [1, 0, 0, 0]
    assert views["processors"].tolist() == [0, 10, 10, 0]
    used = views["bias_values"] != 0
    assert np.argwhere(used).tolist() == [[1, 0]]
    assert (views["bias_ids"][1, 0], views["bias_values"][1, 0]) == (3, 1.5)
    assert (~views["banned"][1]).tolist() == [1, 2]
    assert not views["banned"][[0, 2, 3]].any()


def test_scored_rows_name_the_next_token_of_the_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    params = SamplingParams(prompt_logprobs=1)
    add(
        scheduler,
        make_sequence(0, prompt(10, 3), params=params),
        make_sequence(1, [1, 2]),
        make_sequence(2, prompt(20, 5), params=params),
    )
    views = build(scheduler.schedule(), mixed("scored"))
    targets = [11, 12, -1, -1, -1, 21, 22, 23]
    assert views["targets"].tolist() == targets + [-1] * 8
    assert views["logit_rows"].tolist() == list(range(16))
    assert views["sample_rows"].tolist() == [2, 4, 7, 16]  # padding: dropped


def test_a_slot_with_a_new_owner_keeps_nothing_of_the_old_one():
    scheduler, builder = make_scheduler(max_num_seqs=2, max_num_batched_tokens=32), make_builder()
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0})
    old, _ = add(
        scheduler, make_sequence(0, prompt(0, 14), params=params), make_sequence(1, prompt(20, 14))
    )
    build(scheduler.schedule(), mixed("full", 32), builder)
    scheduler.abort(old)
    (new,) = add(scheduler, make_sequence(2, [5]))
    plan = scheduler.schedule()
    assert [(row.seq.seq_id, row.slot) for row in plan.rows] == [(1, 1), (2, 0)]
    views = build(plan, mixed("full"), builder)
    assert views["page_table"][1].tolist() == new.page_ids + [0] * (PAGES_PER_SEQ - 1)
    assert views["temperature"][1] == 0
    assert not views["bias_values"][1].any()


def test_a_batch_is_not_written_again_by_later_ones():
    scheduler, builder = make_scheduler(), make_builder()
    add(scheduler, make_sequence(0, [5, 6]))
    first = builder.build(scheduler.schedule(), mixed("sampled"))
    before = first.forward.copy()
    builder.build(scheduler.schedule(), mixed("sampled"))
    assert (first.forward == before).all()


@pytest.mark.parametrize("bucket", [mixed("greedy", 4, 4), mixed("greedy", 16, 1)])
def test_a_plan_larger_than_its_bucket_is_refused(bucket):
    scheduler = make_scheduler()
    add(scheduler, make_sequence(0, prompt(0, 3)), make_sequence(1, prompt(10, 3)))
    with pytest.raises(InvariantError, match="2 rows of 6 tokens do not fit"):
        make_builder().build(scheduler.schedule(), bucket)
