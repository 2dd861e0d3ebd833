import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.buckets import Bucket, BucketLadder, default_ladder
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.plan import PlannedRow, StepPlan
from jaxpaged.errors import ConfigError, InvariantError
from tests.core.fake_device import make_sequence

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)
MASKED = SamplingParams(allowed_token_ids=[1, 2], min_tokens=1)
FULL = SamplingParams(temperature=1.0, presence_penalty=1.0)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=1)


def plan_of(q_lens, params=(GREEDY,), samples=True):
    """Rows with these q_lens; the last row's parameters repeat."""
    rows = []
    for i, q_len in enumerate(q_lens):
        of_row = params[min(i, len(params) - 1)]
        seq = make_sequence(i, range(q_len + 1), params=of_row)
        rows.append(PlannedRow(seq, i, 0, q_len, samples))
    return StepPlan.of(rows)


LADDER = BucketLadder(
    [Bucket("decode", name, n, n) for n in (2, 8) for name in ("greedy", "full")]
    + [
        Bucket("mixed", name, n, s)
        for n, s in ((16, 4), (16, 8), (64, 8))
        for name in ("greedy", "full")
    ]
    + [Bucket("mixed", "scored", 16, 8)]
)


@pytest.mark.parametrize(
    ("q_lens", "bucket"),
    [
        ([1], Bucket("decode", "greedy", 2, 2)),
        ([1, 1, 1], Bucket("decode", "greedy", 8, 8)),
        ([1, 2], Bucket("mixed", "greedy", 16, 4)),
        ([1, 1, 1, 1, 2], Bucket("mixed", "greedy", 16, 8)),
        ([17], Bucket("mixed", "greedy", 64, 8)),
        ([64], Bucket("mixed", "greedy", 64, 8)),
    ],
)
def test_the_smallest_bucket_that_holds_the_plan_is_chosen(q_lens, bucket):
    assert LADDER.choose(plan_of(q_lens)) == bucket


def test_sizes_of_mixed_steps_are_without_those_of_steps_that_score_a_prompt():
    with_scored = BucketLadder([*LADDER.all_buckets(), Bucket("mixed", "scored", 32, 8)])
    assert with_scored.step_sizes() == (16, 64)


@pytest.mark.parametrize(
    ("params", "sampler"),
    [
        ([GREEDY, GREEDY], "greedy"),
        ([GREEDY, SAMPLED], "full"),  # stands in for `sampled`, which this ladder lacks
        ([FULL, GREEDY], "full"),
        ([MASKED, GREEDY], "full"),  # likewise
        ([GREEDY, SCORED], "scored"),
    ],
)
def test_the_row_that_asks_most_decides_the_sampler(params, sampler):
    assert LADDER.choose(plan_of([3, 2], params)).sampler == sampler


@pytest.mark.parametrize(
    ("params", "sampler"),
    [
        ([GREEDY, MASKED, SAMPLED], "masked"),
        ([MASKED, FULL], "full"),
        ([SamplingParams(temperature=0.0, bad_words=["a"])], "masked"),
        ([SamplingParams(temperature=0.0, logprobs=1, min_tokens=1)], "full"),
    ],
)
def test_on_a_gpu_bans_and_biases_have_a_sampler_of_their_own(params, sampler):
    bucket = default_ladder("gpu", 8, 256).choose(plan_of([1, 1, 1], params))
    assert (bucket.kind, bucket.sampler) == ("decode", sampler)


@pytest.mark.parametrize(
    ("rows", "params", "chosen"),
    [
        (150, SAMPLED, ("sampled", 160)),
        (150, FULL, ("full", 192)),
        (150, MASKED, ("full", 192)),
        (200, FULL, ("full", 256)),
        (200, MASKED, ("masked", 256)),
    ],
)
def test_a_sampler_that_a_size_lacks_has_a_stand_in(rows, params, chosen):
    bucket = default_ladder("gpu", 256, 8192).choose(plan_of([1] * rows, [params]))
    assert (bucket.sampler, bucket.num_seqs) == chosen


def test_the_largest_size_has_every_sampler():
    buckets = default_ladder("gpu", 224, 8192).all_buckets()
    names = {b.sampler for b in buckets if b.kind == "decode" and b.num_seqs == 224}
    assert names == {"greedy", "sampled", "masked", "full"}


def test_a_chain_of_masked_steps_takes_the_full_sampler():
    ladder = default_ladder("gpu", 8, 256)
    masked = ladder.choose(plan_of([1], [MASKED]))
    assert ladder.chained(masked) == Bucket("decode", "full", 1, 1)
    assert "masked" not in {bucket.sampler for bucket in ladder.chained_buckets()}


def test_rows_that_sample_nothing_ask_for_no_sampler():
    assert LADDER.choose(plan_of([3, 2], [FULL], samples=False)).sampler == "greedy"


def test_a_scored_decode_is_a_mixed_step():
    assert LADDER.choose(plan_of([1], [SCORED])) == Bucket("mixed", "scored", 16, 8)


@pytest.mark.parametrize("q_lens", [[65], [2] * 9])
def test_a_plan_that_no_bucket_holds_is_refused(q_lens):
    with pytest.raises(InvariantError, match="no bucket holds"):
        LADDER.choose(plan_of(q_lens))


def test_an_unknown_platform_is_refused():
    with pytest.raises(ConfigError, match="'tpu', allowed are cpu and gpu"):
        default_ladder("tpu", 8, 256)


@pytest.mark.parametrize(
    ("platform", "max_num_seqs", "max_tokens", "most", "most_samplers"),
    [
        ("gpu", 256, 8192, 37, 28),
        ("gpu", 256, 16384, 39, 28),
        ("gpu", 64, 2048, 22, 13),
        ("cpu", 8, 256, 10, 20),
    ],
)
def test_a_default_ladder_has_few_programs(platform, max_num_seqs, max_tokens, most, most_samplers):
    buckets = default_ladder(platform, max_num_seqs, max_tokens).all_buckets()
    assert len({bucket.forward_name for bucket in buckets}) <= most
    assert len({b.sample_name for b in buckets if b.needs_sampling}) <= most_samplers


def test_given_sizes_replace_the_platforms_own():
    buckets = default_ladder("gpu", 32, 512, (4, 20, 64), (100,)).all_buckets()
    sizes = {(b.kind, b.num_tokens) for b in buckets if b.sampler == "full"}
    assert sizes == {("decode", n) for n in (4, 20, 32)} | {("mixed", n) for n in (100, 512)}


@given(
    platform=st.sampled_from(["cpu", "gpu"]),
    max_num_seqs=st.integers(1, 600),
    max_tokens=st.integers(1, 20_000),
    num_seqs=st.integers(1, 600),
    num_tokens=st.integers(1, 20_000),
    params=st.sampled_from([GREEDY, SAMPLED, FULL, SCORED]),
)
def test_a_default_ladder_holds_every_plan_within_the_limits(
    platform, max_num_seqs, max_tokens, num_seqs, num_tokens, params
):
    most = min(max_tokens, 256) if params is SCORED else max_tokens
    num_tokens = min(num_tokens, most)
    num_seqs = min(num_seqs, max_num_seqs, num_tokens)
    share = num_tokens // num_seqs
    plan = plan_of([num_tokens - share * (num_seqs - 1)] + [share] * (num_seqs - 1), [params])
    ladder = default_ladder(platform, max_num_seqs, max_tokens)
    bucket = ladder.choose(plan)
    assert bucket in ladder.all_buckets()
    assert bucket.num_tokens >= num_tokens
    assert bucket.num_seqs >= num_seqs


def test_steps_with_drafts_have_sizes_of_their_own_where_speculation_is_on():
    speculation = Speculation("ngram", 5, 4, 2)
    plain = default_ladder("gpu", 256, 8192).all_buckets()
    added = set(default_ladder("gpu", 256, 8192, speculation=speculation).all_buckets())
    added -= set(plain)
    assert {bucket.kind for bucket in added} == {"draft"}
    assert {bucket.sampler for bucket in added} == {"greedy", "sampled"}
    assert max(bucket.num_tokens for bucket in added) == 32 * 6
    assert all(b.num_logits == b.num_samples == b.num_tokens >= b.num_seqs for b in added)


def test_several_steps_a_program_come_in_few_sizes_that_hold_every_decode_step():
    ladder = default_ladder("gpu", 256, 8192)
    decodes = [bucket for bucket in ladder.all_buckets() if bucket.kind == "decode"]
    for bucket in decodes:
        one = ladder.chained(bucket)
        assert one in ladder.chained_buckets()
        assert one in decodes
        assert one.sampler == ("full" if bucket.sampler == "masked" else bucket.sampler)
        assert one.num_seqs >= bucket.num_seqs
    assert len({one.num_seqs for one in ladder.chained_buckets()}) == 6
    assert {one.num_seqs for one in default_ladder("gpu", 5, 512).chained_buckets()} == {1, 5}
