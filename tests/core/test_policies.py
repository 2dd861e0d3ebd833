"""Who comes next and who gives way, under each policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.policies import AGEING, OUTPUT_WEIGHT, PROMPT_WEIGHT, make_policy
from tests.core.fake_device import (
    Loop,
    add,
    commit,
    make_scheduler,
    make_sequence,
    prompt,
    shares,
)


def admitted(scheduler):
    return [seq_id for seq_id, *_ in shares(scheduler.schedule())]


def admission_order(scheduler, loop=None):
    """Sequence ids as they get their first row, until all have finished."""
    order, loop = [], loop or Loop(scheduler)
    while scheduler.has_work or loop.in_flight:
        loop.step()
        order += [seq_id for seq_id in scheduler._running if seq_id not in order]
    return order


def crowd(policy, *, prompt_lens=(7, 7, 7), **requests):
    """Three running sequences on 6 pages; soon each wants a third one."""
    scheduler = make_scheduler(
        num_pages=7, max_num_batched_tokens=32, max_num_seqs=4, scheduling_policy=policy
    )
    seqs = [
        make_sequence(i, prompt(20 * i, length), 12, **{name: v[i] for name, v in requests.items()})
        for i, length in enumerate(prompt_lens)
    ]
    add(scheduler, *seqs)
    plans = [scheduler.schedule(), scheduler.schedule()]
    commit(scheduler, plans[0])
    assert scheduler.num_running == 3
    return scheduler, seqs


# --- priority


def test_a_smaller_priority_comes_first_and_equals_in_order():
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    for seq_id, priority in enumerate([5, 0, -3, 0]):
        scheduler.add(make_sequence(seq_id, [seq_id], 1, priority=priority))
    assert admission_order(scheduler) == [2, 1, 3, 0]


def test_the_least_important_sequence_gives_way_though_it_is_the_oldest():
    scheduler, seqs = crowd("priority", priority=(9, 1, 1))
    assert shares(scheduler.schedule()) == [(1, 8, 1), (2, 8, 1)]
    assert [seq.num_preemptions for seq in seqs] == [1, 0, 0]


# --- sjf


def test_the_shorter_prompt_comes_first():
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="sjf")
    for seq_id, length in enumerate([30, 8, 20]):
        scheduler.add(make_sequence(seq_id, prompt(40 * seq_id, length), 1))
    assert admission_order(scheduler) == [1, 2, 0]


def test_tokens_in_the_prefix_cache_do_not_count():
    scheduler = make_scheduler(max_num_seqs=1, num_pages=33, scheduling_policy="sjf")
    loop = Loop(scheduler)
    loop.run([make_sequence(0, prompt(0, 16), 1)])
    add(scheduler, make_sequence(1, prompt(60, 8), 1), make_sequence(2, prompt(0, 19), 1))
    assert admission_order(scheduler, loop) == [2, 1]


def test_a_prefix_that_is_computed_meanwhile_moves_its_heirs_forward():
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "scheduling_policy": "sjf"}
    scheduler = make_scheduler(num_pages=33, **limits)
    heir, other = make_sequence(1, prompt(0, 19), 1), make_sequence(2, prompt(60, 12), 1)
    add(scheduler, make_sequence(0, prompt(0, 16), 1))
    scheduler.schedule()
    add(scheduler, heir, other)
    assert [scheduler._waiting.first() for _ in range(2)] == [other, other]
    scheduler.schedule()
    assert [scheduler._waiting.first() for _ in range(2)][1] is heir


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=30))
@settings(deadline=None)
def test_what_overtakes_a_prompt_is_bounded_by_its_length(lengths):
    """The last one aside, later prompts that come first have under AGEING times its tokens."""
    line = make_policy("sjf", lambda seq: seq.num_prompt_tokens)
    seqs = [make_sequence(i, prompt(0, length)) for i, length in enumerate(lengths)]
    for seq in seqs:
        line.add(seq)
    order = []
    while len(line):
        order.append(line.first())
        line.remove(order[-1])
    for seq in seqs:
        ahead = order[: order.index(seq)]
        later = sorted(other.seq_id for other in ahead if other.seq_id > seq.seq_id)
        assert sum(lengths[i] for i in later[:-1]) < AGEING * lengths[seq.seq_id]


def test_a_long_prompt_is_served_while_short_ones_keep_coming():
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="sjf")
    long = make_sequence(0, prompt(0, 20), 1)
    scheduler.add(long)
    loop, short = Loop(scheduler), []
    while long.first_scheduled_time is None:
        short.append(make_sequence(len(short) + 1, [len(short) % 30, 3], 1))
        scheduler.add(short[-1])
        loop.step()
    served = [seq for seq in short if seq.first_scheduled_time is not None]
    assert 40 < len(served) <= AGEING * 20 // 2
    assert len(short) > len(served)


def test_the_longest_sequence_gives_way():
    scheduler, seqs = crowd("sjf", prompt_lens=(7, 5, 5))
    assert shares(scheduler.schedule()) == [(1, 6, 1), (2, 6, 1)]
    assert [seq.num_preemptions for seq in seqs] == [1, 0, 0]


# --- fair


def fair(num_seqs=1, **limits):
    return make_scheduler(
        max_num_seqs=num_seqs, num_pages=65, max_num_batched_tokens=64,
        scheduling_policy="fair", **limits,
    )  # fmt: skip


def test_two_keys_take_turns_however_much_one_of_them_sends():
    scheduler = fair()
    for seq_id in range(8):
        scheduler.add(make_sequence(seq_id, [seq_id], 2, key_name="many"))
    add(scheduler, *(make_sequence(i, [i], 2, key_name="few") for i in (8, 9)))
    assert admission_order(scheduler)[:4] == [0, 8, 1, 9]


def test_a_key_that_was_idle_has_saved_nothing_up():
    scheduler = fair()
    add(scheduler, *(make_sequence(i, [i], 2, key_name="busy") for i in range(6)))
    loop = Loop(scheduler)
    while scheduler.num_waiting > 2:
        loop.step()
    add(scheduler, *(make_sequence(i, [i], 2, key_name="idle") for i in range(6, 12)))
    line = scheduler._waiting._live
    assert line.counter("idle") == line.counter("busy") > 0


def test_output_costs_more_than_prompt_and_cached_tokens_cost_nothing():
    scheduler = fair()
    loop = Loop(scheduler)
    for seq_id, num_computed in ((0, 9), (1, 1)):
        before = scheduler._waiting._live.counter("k")
        seq = make_sequence(seq_id, prompt(0, 9), 3, key_name="k")
        loop.run([seq])
        cost = PROMPT_WEIGHT * num_computed + OUTPUT_WEIGHT * len(seq.output_token_ids)
        assert scheduler._waiting._live.counter("k") - before == cost


@pytest.mark.parametrize("lengths", [(1, 1), (30, 2), (3, 25)])
def test_the_service_of_two_keys_that_wait_differs_by_no_more_than_the_bound(lengths):
    """The bound of the paper: twice the larger of one prompt's and a full pool's cost."""
    scheduler = fair(4, enable_prefix_caching=False)
    served, num_added = {"a": 0, "b": 0}, 0
    bound = 2 * max(PROMPT_WEIGHT * max(lengths), OUTPUT_WEIGHT * 4 * (max(lengths) + 6))
    loop, seen = Loop(scheduler), None
    while min(served.values()) < 2 * bound:
        for key, length in zip("ab", lengths, strict=True):
            for _ in range(4 - sum(seq.request.key_name == key for seq in scheduler._waiting)):
                scheduler.add(make_sequence(num_added, prompt(0, length), 6, key_name=key))
                num_added += 1
        loop.step()
        plan = loop.in_flight[-1][0] if loop.in_flight else seen
        if plan is seen:
            continue
        seen = plan
        for row in plan.rows:
            prefill = min(row.q_len, max(row.seq.num_prompt_tokens - row.start, 0))
            cost = PROMPT_WEIGHT * prefill + OUTPUT_WEIGHT * row.samples
            served[row.seq.request.key_name] += cost
        assert abs(served["a"] - served["b"]) <= bound


def test_the_key_that_got_most_gives_way_and_waits_behind_its_own_newcomers():
    scheduler, seqs = crowd("fair", key_name=("greedy", "modest", "modest"))
    scheduler._waiting._live._counters["greedy"] += 100_000
    scheduler.schedule()
    assert [seq.num_preemptions for seq in seqs] == [1, 0, 0]
    newcomer = make_sequence(3, prompt(90, 3), key_name="greedy")
    scheduler.add(newcomer)
    assert list(scheduler._waiting) == [seqs[0], newcomer]
    for token in range(30):
        seqs[0].token_ids.append(token)
    scheduler._waiting.remove(seqs[0])
    scheduler._waiting.put_back(seqs[0])
    assert list(scheduler._waiting) == [newcomer, seqs[0]]


# --- fair and sjf: output counts once in a while


@pytest.mark.parametrize("policy", ["fair", "sjf"])
def test_sequences_of_like_age_do_not_take_each_others_pages_in_turn(policy):
    def run(policy):
        local = {"window": 6, "num_local_pages": 6}  # for one and a half
        scheduler = make_scheduler(num_pages=33, scheduling_policy=policy, **local)
        loop = Loop(scheduler)
        loop.run([make_sequence(i, [i], 40) for i in range(2)])
        return loop.num_steps, scheduler.num_preemptions

    assert run(policy) == run("fcfs")


@pytest.mark.parametrize("policy", ["fair", "sjf"])
def test_a_running_sequence_loses_rank_once_in_256_tokens_of_output(policy):
    line = make_policy(policy, lambda seq: seq.num_prompt_tokens)
    first, second = (make_sequence(i, [i], 999) for i in range(2))
    line.add(first)
    line.add(second)
    first.token_ids += range(255)
    assert line.in_order([second, first]) == [first, second]
    first.token_ids.append(0)
    assert line.in_order([first, second]) == [second, first]


# --- admission without eviction


def test_a_sequence_is_admitted_only_when_its_whole_answer_fits_beside_the_others():
    scheduler = make_scheduler(num_pages=9, admission="no-evict")
    add(scheduler, make_sequence(0, prompt(0, 4), 13), make_sequence(1, prompt(20, 4), 14))
    assert admitted(scheduler) == [0]
    scheduler = make_scheduler(num_pages=9, admission="no-evict")
    add(scheduler, make_sequence(0, prompt(0, 4), 13), make_sequence(1, prompt(20, 4), 13))
    assert admitted(scheduler) == [0, 1]


def test_nothing_is_preempted_where_admission_counts_whole_answers():
    def storm(**limits):
        scheduler = make_scheduler(num_pages=17, max_num_seqs=8, **limits)
        seqs = [make_sequence(i, prompt(3 * i, 1 + i % 7), 30) for i in range(24)]
        Loop(scheduler).run(seqs)
        return scheduler.num_preemptions, [seq.token_ids for seq in seqs]

    (with_eviction, tokens), (without, same) = storm(), storm(admission="no-evict")
    assert with_eviction > 5
    assert without == 0
    assert same == tokens
