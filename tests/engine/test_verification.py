import pytest

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.params import SamplingParams
from tests.support.engines import TinyEngine
from tests.support.models import byte_ids

pytestmark = pytest.mark.usefixtures("steady_pace")
SPECULATION = Speculation("ngram", 3, 4, 2)
LIST = [*range(60, 110), 60, 61, 62]  # what S says anyhow; a to z are 64 to 89


def both(parts, prompts, params, **settings):
    """Outputs with guesses, told in pieces, and without, token by token; and the drafts."""
    llm = TinyEngine(parts).llm
    requests = list(map(llm.parts.inputs.request, prompts, params))
    jobs = [(None, request) for request in requests]
    ended = {out.request_id: out for out in llm.run(jobs, max_inflight=len(jobs))}
    plain = [ended[request.request_id] for request in requests]
    engine = TinyEngine(parts, speculation=SPECULATION, **settings)
    drafts, schedule = [], engine.scheduler.schedule

    def watched():
        plan = schedule()
        drafts.extend(plan.drafts.values())
        return plan

    engine.scheduler.schedule = watched
    engine.engine.metrics.enable_speculation(SPECULATION.num_speculative_tokens)
    return engine.generate(prompts, params), plain, drafts, engine


def told(output):
    """All that a caller sees of the answers, logprobs to two places."""
    return [
        (a.token_ids, a.text, a.finish_reason, a.stop_reason, round(a.cumulative_logprob, 2))
        for a in output.outputs
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 0.4, "top_p": 0.9, "seed": 2, "n": 2},
        {"temperature": 0.0, "stop": ["rs"]},  # in the middle of a draft, wherever drafts begin
        {"temperature": 0.0, "stop": ["wxyz"], "include_stop_str_in_output": True},
        {"temperature": 0.0, "stop_token_ids": [byte_ids("v")[0]]},
    ],
)
def test_guessing_changes_nothing_that_a_caller_sees(parts_s, fields):
    params = SamplingParams(**{"max_tokens": 40} | fields)
    prompts = [LIST, LIST[3:]] if "n" not in fields else [LIST]
    found, plain, drafts, _ = both(parts_s, prompts, [params] * len(prompts))
    assert len(drafts) > 2
    assert [told(output) for output in found] == [told(output) for output in plain]


def test_steps_by_themselves_with_drafts_and_several_in_one_program_change_nothing(parts_s):
    beside = {"temperature": 0.0, "max_tokens": 9, "presence_penalty": 0.5, "logprobs": 2}
    params = [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=0.0, max_tokens=60, stop=["wxyz"]),
        SamplingParams(**beside),  # while it is there nobody drafts
    ]
    prompts = [LIST, LIST[3:], LIST[7:]]
    found, plain, drafts, engine = both(parts_s, prompts, params, num_scheduler_steps=4)
    assert [told(output) for output in found] == [told(output) for output in plain]
    assert len(drafts) > 2
    names = " ".join(engine.engine.runner.temp_bytes())
    assert "chain 4" in names
    assert "forward draft" in names


def test_wrong_guesses_leave_no_trace(parts_s):
    # the text says c, then x; the model says c, then d: guesses are often wrong
    prompt = byte_ids("abcdefgh" * 3 + "abcdefgx" * 3 + "ab")
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=100)
    found, plain, drafts, _ = both(parts_s, [prompt], [params])
    assert drafts
    assert told(found[0]) == told(plain[0])


def test_drafts_are_counted_under_vllms_names(parts_s):
    params = SamplingParams(temperature=0.0, max_tokens=40)
    found, _, drafts, engine = both(parts_s, [LIST], [params])
    text = engine.engine.metrics.text().decode()
    counts = {
        line.split("{")[0]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("vllm:spec_decode") and "_total" in line and "per_pos" not in line
    }
    assert counts["vllm:spec_decode_num_drafts_total"] == len(drafts)
    assert counts["vllm:spec_decode_num_draft_tokens_total"] == sum(map(len, drafts))
    accepted = counts["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 20
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total{" in text
    assert 'position="2"' in text
    steps = len(found[0].outputs[0].token_ids) - accepted
    assert steps < 20


def test_a_row_that_is_not_finite_fails_alone_while_its_guesses_are_checked(parts_s):
    engine = TinyEngine(parts_s, speculation=SPECULATION)
    runner, read = engine.engine.runner, engine.engine.runner.read
    seen = []

    def broken(pending):
        result = read(pending)
        if pending.bucket.kind == "draft" and not seen:
            seen.append(pending)
            result.is_finite[1] = False  # the second token of the first row
        return result

    params = [SamplingParams(temperature=0.0, max_tokens=40) for _ in range(2)]
    engine.engine.steps.runner = _Reading(runner, broken)
    outputs = engine.generate([LIST, LIST[5:]], params)
    reasons = sorted(output.outputs[0].finish_reason for output in outputs)
    assert seen
    assert reasons == ["error", "length"]


class _Reading:
    """A runner whose `read` is another one."""

    def __init__(self, runner, read):
        self._runner, self.read = runner, read

    def __getattr__(self, name):
        return getattr(self._runner, name)


def test_settings_that_cannot_work_are_refused():
    from jaxpaged.config.settings import SchedulerSettings
    from jaxpaged.errors import ConfigError

    good = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    made = SchedulerSettings(speculative_config=good).speculation
    assert made == Speculation("ngram", 5, 4, 4)
    drafting = SchedulerSettings(speculative_config={"model": "x", "num_speculative_tokens": 2})
    assert drafting.speculation == Speculation("draft_model", 2, model="x")
    cases = [
        ({"method": "eagle"}, "method is 'eagle'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, allowed are 1 to 31"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min is 5, allowed are 1 to prompt_lookup_max"),
        ({"prompt_lookup_max": "4"}, "must be a whole number"),
        ({"tokens": 5}, "has tokens, known are"),
        ({"model": "x"}, "method is 'ngram' and model 'x': a draft_model has a model"),
        ({"method": "draft_model"}, "method is 'draft_model' and model ''"),
        ({"model": 3}, "model is 3, revision None: must be text"),
    ]
    for change, text in cases:
        with pytest.raises(ConfigError, match=text):
            SchedulerSettings(speculative_config=good | change)
    with pytest.raises(ConfigError, match="lacks num_speculative_tokens"):
        SchedulerSettings(speculative_config={"method": "ngram"})
