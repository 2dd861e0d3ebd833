import json
from itertools import chain
from pathlib import Path

import pytest

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.recording import RecordedScheduler, replay
from jaxpaged.core.structured import ReasoningMarks, StructuredOutputsParams
from jaxpaged.errors import ConfigError
from jaxpaged.replay import main
from tests.core.fake_device import EOS, Loop, make_scheduler, make_sequence
from tests.core.test_schedule_workloads import MAX_LEN, PAGES_OF_LONGEST, Job, sequences_of


def record_storm(file: Path, policy="fcfs", window=0, mode="recompute"):
    """A preemption storm with penalties, stops, two salts, an abort and a reset, recorded."""
    options = [
        {"presence_penalty": 0.5},
        {"ignore_eos": True},
        {"stop_token_ids": [3, 4]},
        {"ignore_eos": True, "skip_reading_prefix_cache": True},
    ]
    jobs = [
        Job((7,) * (i % 9) + (6, i % 4), 30, options[i % 4], "ab"[i % 2], 0, None, "xyz"[i % 3], i)
        for i in range(24)
    ]
    scheduler = make_scheduler(
        num_pages=PAGES_OF_LONGEST * 5 // 4,
        max_num_seqs=8,
        max_model_len=MAX_LEN,
        scheduling_policy=policy,
        window=window,
        num_local_pages=7,
        preemption_mode=mode,
        num_host_pages=24,
    )
    loop = Loop(RecordedScheduler(scheduler, file))
    for i, seq in enumerate(chain(*sequences_of(jobs, ((3, 4),)))):
        loop.scheduler.add(seq)
        if i == 10:
            loop.scheduler.abort(seq)
        if i == 15:
            loop.scheduler.reset_prefix_cache()
        loop.step()
    loop.run()
    return loop


@pytest.mark.parametrize(
    ("policy", "window", "mode"),
    [
        ("fcfs", 0, "recompute"),
        ("fcfs", 0, "swap"),
        ("fcfs", 6, "swap"),
        ("priority", 0, "recompute"),
        ("fair", 0, "swap"),
        ("sjf", 0, "recompute"),
    ],
)
def test_a_recorded_storm_is_planned_the_same_again(tmp_path, policy, window, mode, capsys):
    file = tmp_path / "run.jsonl"
    loop = record_storm(file, policy, window, mode)
    found = replay(file)
    assert found.mismatch is None
    assert found.num_plans == loop.num_steps
    assert found.num_preemptions == loop.scheduler.num_preemptions > 15
    assert (loop.scheduler.tier.num_swaps > 10) == (mode == "swap")
    assert main([str(file)]) == 0
    assert "all as recorded" in capsys.readouterr().out
    assert file.stat().st_mode & 0o077 == 0


def record_answers(file, admission):
    """More answers than it takes to foretell some; a few cannot stop. There are too few pages."""
    options = [{}, {}, {}, {"ignore_eos": True}, {"n": 2, "logit_bias": {EOS: -0.1}}]
    jobs = [
        Job((7,) * (i % 9) + (6, i % 4), 9 + i % 23, options[i % 5], "", i // 3, None)
        for i in range(80)
    ]
    limits = {"max_num_seqs": 8, "max_model_len": MAX_LEN, "admission": admission}
    loop = Loop(RecordedScheduler(make_scheduler(num_pages=19, **limits), file))
    loop.run(chain(*sequences_of(jobs)))
    return loop


def test_what_is_foreseen_of_lengths_is_foreseen_again(tmp_path):
    file = tmp_path / "run.jsonl"
    loop = record_answers(file, "foresee")
    assert len(loop.scheduler._reuse._foresight._lengths) > 60
    found = replay(file)
    assert (found.mismatch, found.num_plans) == (None, loop.num_steps)
    file.write_text(file.read_text().replace('"admission":"foresee"', '"admission":"evict"', 1))
    assert replay(file).mismatch is not None


@pytest.mark.parametrize(("admission", "before"), [("evict", "false"), ("no-evict", "true")])
def test_a_record_from_before_there_was_foresight_is_planned_the_same_again(
    tmp_path, admission, before
):
    file = tmp_path / "run.jsonl"
    record_answers(file, admission)
    now, then = f'"admission":"{admission}"', f'"reserve_whole_answer":{before}'
    assert now in file.read_text()
    file.write_text(file.read_text().replace(now, then, 1))
    assert replay(file).mismatch is None


def test_of_a_grammar_it_is_kept_that_there_is_one(tmp_path):
    """While a row follows a grammar nobody's next tokens are guessed, so it must be known."""
    file = tmp_path / "run.jsonl"
    scheduler = make_scheduler(max_num_seqs=3, speculation=Speculation("ngram", 3, 3, 1))
    loop = Loop(RecordedScheduler(scheduler, file))
    for i in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        grammar = object() if i == 3 else None
        loop.scheduler.add(make_sequence(i, [7, 8] * 5, 30, params=params, grammar=grammar))
    loop.run()
    assert replay(file).mismatch is None
    assert file.read_text().count('"has_grammar":true') == 1


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {7: 1.0}},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
        {"reasoning": ReasoningMarks("<think>", "</think>", is_open=True, max_tokens=3)},
        {"extra_args": {"the caller's own": object()}},
        {"stop": ["half a pair \ud800"], "logit_bias": {7: 1.0}},
    ],
)
def test_a_request_is_played_again_whatever_it_asks_for(tmp_path, options):
    file = tmp_path / "run.jsonl"
    loop = Loop(RecordedScheduler(make_scheduler(), file))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **options)
    loop.run([make_sequence(params=params)])
    found = replay(file)
    assert (found.mismatch, found.num_plans) == (None, loop.num_steps)


def test_a_replay_finds_the_first_plan_that_differs(tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    record_storm(file)
    events = [json.loads(line) for line in file.read_text().splitlines()]
    adds = [event for event in events if event["event"] == "add"]
    adds[5]["request"]["prompt_token_ids"].append(8)  # a page earlier than recorded
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = replay(file)
    assert found.mismatch is not None
    assert events[found.mismatch - 1]["event"] == "plan"
    assert main([str(file)]) == 1
    assert f"line {found.mismatch} differs" in capsys.readouterr().out


def test_a_record_that_was_cut_off_is_replayed_up_to_there(tmp_path):
    file = tmp_path / "run.jsonl"
    record_storm(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert replay(file).mismatch is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not the start of a record"),
        ('{"event": "add"}\n', "not the start of a record"),
        ("[]\n", "line 1 is no event"),
        ("nonsense\n", "is no record"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, text, problem, capsys):
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        replay(file)
    assert main([str(file)]) == 2
    assert problem in capsys.readouterr().err


def test_an_event_that_cannot_be_is_refused_with_its_line(tmp_path):
    file = tmp_path / "run.jsonl"
    RecordedScheduler(make_scheduler(), file).add(make_sequence(0))
    file.write_text(file.read_text() + '{"event": "commit", "plan": 3, "sampled": []}\n')
    with pytest.raises(ConfigError, match=r"line 3 cannot be played: KeyError\(3\)"):
        replay(file)


def test_a_record_that_cannot_be_written_is_a_setting_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="--record x cannot be written"):
        RecordedScheduler(make_scheduler(), tmp_path / "none" / "x")
