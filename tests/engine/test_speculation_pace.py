"""An engine whose device has a clock: when it drafts, and that it else runs as without drafts."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged.config.speculation import Speculation
from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import default_ladder
from jaxpaged.core.packing import PackedLayout
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.recording import RecordedScheduler, replay
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine import pipeline
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.engine.llm import LLM
from jaxpaged.engine.runner import PendingStep, StepResult
from jaxpaged.metrics import EngineMetrics
from jaxpaged.text.tokenizer import ids_only_tokenizer
from tests.core.fake_device import make_limits

VOCAB, PAGE_SIZE, MAX_LEN = 64_000, 16, 1024
LIST = np.random.default_rng(0).integers(1000, VOCAB, 300)
START_S, STEP_S, TOKEN_S, READ_S = 1.3e-3, 1e-3, 1e-5, 3e-4  # of a small model on an H200


class TimedDevice:
    """Copies a list; a step takes its time, and starting one takes the host's."""

    num_compilations, last_compile_time, num_stages = 0, 0.0, 1

    def __init__(self, step_s=STEP_S, repeats=True, slower=1, strangers=()):
        self.now, self.step_s, self.repeats, self.free_at = 0.0, step_s, repeats, 0.0
        self.strangers = strangers  # slots of rows that do not copy
        self.num_unread = 0
        self.slower = slower  # how much longer a step with drafts takes
        self.log = []  # kinds of programs as they start, each with how many are unread; reads

    def start(self, name, bucket, num_steps=1):
        self.num_unread += 1
        self.log.append((name, self.num_unread))
        self.now += START_S
        step_s = self.step_s + TOKEN_S * bucket.num_tokens
        step_s *= self.slower if name == "draft" else 1
        self.free_at = max(self.now, self.free_at) + num_steps * step_s
        return self.free_at

    def dispatch(self, batch):
        return PendingStep(batch.bucket, (self.start(batch.bucket.kind, batch.bucket), batch))

    def dispatch_chain(self, batches):
        bucket = batches[0].bucket
        end = self.start("chain", bucket, len(batches))
        return [PendingStep(bucket, (end, batch), i) for i, batch in enumerate(batches)]

    def copy_pages(self, plan):
        """There are no pages."""

    def read(self, pending):
        end, batch = pending.words
        if not pending.place:
            self.num_unread -= 1
            self.log.append(("read", self.num_unread))
            self.now = max(self.now, end) + READ_S
        bucket = pending.bucket
        views = PackedLayout(bucket, MAX_LEN // PAGE_SIZE, VOCAB, False).views(batch)
        places = views["positions"]
        if bucket.kind != "draft":
            places = places[np.maximum(views["cu_q_lens"][1:] - 1, 0)]
        places = places[: bucket.num_samples] + 1
        slots = views["seq_slots"]
        if bucket.kind == "draft":
            slots = np.repeat(slots, np.diff(views["cu_q_lens"]))
        slots = np.resize(slots, len(places))
        copies = self.repeats & ~np.isin(slots, self.strangers)
        ids = np.where(copies, LIST[places % len(LIST)], places * 7919 % 60_000 + 1000)
        none = np.empty((0, 20), np.float32)
        ranks = none[:, 0].astype(np.int32)
        ones = np.ones(len(ids))
        told = none[:, 0], ranks, none.astype(np.int32), none
        return StepResult(ids.astype(np.int32), ones.astype(np.float32), ones > 0, *told)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Runs requests that each go on with a list; the device afterwards, and the answers."""

    def run(rows, *, guesses=5, steps=8, lengths=(60,), single_cost=0.0, **device_fields):
        device = TimedDevice(**device_fields)
        monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: device.now))
        speculation = Speculation("ngram", guesses, 4, 2) if guesses else None
        pool = PagePool(2 + rows * 64, PAGE_SIZE)
        limits = make_limits(
            max_num_seqs=rows,
            max_num_batched_tokens=2048,
            max_model_len=MAX_LEN,
            enable_prefix_caching=False,
            reserve_full_prompt=True,
            speculation=speculation,
            single_cost=single_cost or (2.0 if steps > 1 else 1.0),
        )
        scheduler = Scheduler(limits, pool, PrefixCache(pool))
        file = tmp_path / f"{rows}{guesses}{steps}"
        engine = Engine(
            device,
            RecordedScheduler(scheduler, file) if guesses else scheduler,
            BatchBuilder(MAX_LEN // PAGE_SIZE, PAGE_SIZE, rows, VOCAB, {}),
            default_ladder("gpu", rows, 2048, speculation=speculation),
            ids_only_tokenizer(),
            EngineMetrics("timed", MAX_LEN),
            2,
            steps,
        )
        engine.metrics.enable_speculation(guesses)
        inputs = InputProcessor(ids_only_tokenizer(), VOCAB, MAX_LEN, 0, ())
        llm = LLM.from_parts(
            SimpleNamespace(engine=engine, inputs=inputs, tokenizer=ids_only_tokenizer())
        )
        fields = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        prompt = [*LIST.tolist(), *LIST[:8].tolist()]
        fields |= {"output_kind": OutputKind.FINAL_ONLY}
        requests = []
        for i in range(rows):
            params = SamplingParams(max_tokens=lengths[i % len(lengths)], **fields)
            requests.append(inputs.request(prompt, params))
        outputs = llm.run([(None, request) for request in requests], max_inflight=rows)
        ids = {output.request_id: output.outputs[0].token_ids for output in outputs}
        if guesses:
            assert replay(file).mismatch is None
        return device, [ids[request.request_id] for request in requests]

    return run


def num_started(device, kind):
    return [name for name, _ in device.log].count(kind)


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize(
    "fields", [{"rows": 33}, {"rows": 3, "repeats": False}], ids=["many rows", "nothing repeats"]
)
def test_who_drafts_nothing_runs_exactly_as_without_drafts(timed, fields, steps):
    plain, wanted = timed(guesses=0, steps=steps, **fields)
    device, ids = timed(steps=steps, **fields)
    assert ids == wanted
    num_same = len(plain.log) * 4 // 5 if "repeats" not in fields else None  # then rows are few
    assert device.log[:num_same] == plain.log[:num_same]
    assert device.now <= plain.now
    # the next program starts before the last one has been read
    started = [unread for name, unread in device.log[:num_same] if name in ("decode", "chain")]
    assert started.count(2) >= len(started) - 3
    assert num_started(device, "chain") >= (6 if steps > 1 else 0)


@pytest.mark.parametrize(
    ("step_s", "steps", "guesses", "gain"),
    [(STEP_S, 8, 5, 1.8), (STEP_S, 8, 15, 3.5), (8 * STEP_S, 1, 5, 3)],
    ids=["chain", "chain, many guesses", "large"],
)
def test_who_is_alone_and_copies_is_faster(timed, step_s, steps, guesses, gain):
    fields = {"lengths": (300,), "step_s": step_s, "steps": steps}
    plain, wanted = timed(1, guesses=0, **fields)
    device, ids = timed(1, guesses=guesses, **fields)
    assert ids == wanted
    assert plain.now / device.now > gain


def test_beside_a_row_that_waits_for_its_tokens_nobody_goes_several_steps_ahead(timed):
    fields = {"lengths": (200,), "single_cost": 1.0, "step_s": 8 * STEP_S}
    plain, wanted = timed(2, guesses=0, strangers=(0,), **fields)
    device, ids = timed(2, strangers=(0,), **fields)
    assert ids == wanted
    names = [name for name, _ in device.log if name != "read"]
    first, last = names.index("draft"), len(names) - names[::-1].index("draft")
    assert names[first:last].count("draft") > 20
    assert names[first:last].count("decode") > 20
    assert "chain" not in names[first:last]
    assert device.now < 1.1 * plain.now


def test_drafts_begin_when_most_rows_have_ended(timed):
    lengths = (200, *[30] * 32)
    plain, wanted = timed(33, guesses=0, lengths=lengths)
    device, ids = timed(33, lengths=lengths)
    assert ids == wanted
    assert num_started(device, "draft") > 20
    first = [name for name, _ in device.log].index("draft")
    assert device.log[: first - 4] == plain.log[: first - 4]  # the last ones are read to draft
    assert device.now < 0.8 * plain.now


def test_drafts_that_take_longer_than_they_gain_are_given_up_and_tried_again_seldom(timed):
    plain, wanted = timed(1, guesses=0, lengths=(600,))
    device, ids = timed(1, lengths=(600,), slower=8)
    assert ids == wanted
    assert 2 <= num_started(device, "draft") <= 12
    assert plain.now / device.now > 0.88
