"""A device that keeps tokens where KV would be, and a loop that runs one step ahead of it.

The next token is a pure function of the tokens that a row sees through its page table, so a page
that is wrong, stale, shared too early or given away too soon changes the answer.
"""

import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxpaged.core.batch_builder import BatchBuilder
from jaxpaged.core.buckets import default_ladder
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.packing import HostBatch, PackedLayout
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.plan import PageMove, StepPlan
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerLimits
from jaxpaged.core.sequence import SeqState, Sequence
from jaxpaged.core.speculation import count_right

VOCAB = 37
EOS = 5


def make_sequence(seq_id=0, prompt=(1, 2, 3), max_tokens=4, *, params=None, choice=0, **request):
    """A sequence of a request; keyword arguments are fields of the request."""
    params = params or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    fields = {
        "request_id": str(seq_id),
        "prompt_token_ids": tuple(prompt),
        "params": params,
        "max_tokens": max_tokens,
        "seed": 0,
        "arrival_time": 0.0,
        "eos_token_ids": frozenset({EOS}),
    }
    return Sequence(seq_id, Request(**fields | request), choice, list(prompt), len(prompt))


def make_limits(**changes):
    fields = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "reserve_full_prompt": False,
        "admission": "evict",
    }
    return SchedulerLimits(**fields | changes)


def make_scheduler(num_pages=17, page_size=4, hash_bits=256, window=0, num_local_pages=0, **limits):
    pool = PagePool(num_pages, page_size)
    local = LocalPages(pool, window, num_local_pages) if window else None
    cache = PrefixCache(pool, hash_bits)
    cache._stretches.num_pages = 2  # prompts in tests are short
    return Scheduler(make_limits(**limits), pool, cache, local)


def add(scheduler, *seqs):
    for seq in seqs:
        scheduler.add(seq)
    return seqs


def shares(plan):
    """(seq_id, start, q_len) of each row."""
    return [(row.seq.seq_id, row.start, row.q_len) for row in plan.rows]


def commit(scheduler, plan, token=9):
    changed = scheduler.commit(plan, [token if row.samples else None for row in plan.rows])
    return [plan.columns.seqs[i] for i in changed]


def prompt(first, num_tokens):
    return range(first, first + num_tokens)


def pick(prefix, bias, allowed, penalty, sampled):
    """The next token after `prefix`: the best of scores that depend on all of it."""
    scores = np.random.default_rng(zlib.crc32(repr(list(prefix)).encode())).random(VOCAB)
    for token, value in bias:
        scores[token] += value
    for token in sampled:
        scores[token] -= penalty
    scores[~np.isin(np.arange(VOCAB), allowed)] = -np.inf
    return int(np.argmax(scores))


class FakeDevice:
    """Runs built batches in the order in which they are dispatched.

    With `window` there are layers that see only so many tokens: all of them, where `has_both` is
    False, so that a token depends on no more; beside others, all that these see is compared.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        pages_per_seq: int,
        window: int = 0,
        num_local_pages: int = 0,
        has_both: bool = False,
    ):
        self.page_size, self.pages_per_seq = page_size, pages_per_seq
        self.max_num_seqs, self.window, self.has_both = max_num_seqs, window, has_both
        if window and not has_both:
            num_pages = num_local_pages
        self.kv = np.full(num_pages * page_size, -1)
        self.local_kv = np.full(num_local_pages * page_size, -1)
        self.local_host: dict[int, np.ndarray] = {}
        self.last_token_ids = np.full(max_num_seqs + 1, -1)
        self.pick = pick
        self.host: dict[int, np.ndarray] = {}
        self.sampled: list[Counter] = [Counter() for _ in range(max_num_seqs + 1)]

    def run(self, plan: StepPlan, batch: HostBatch) -> list[int]:
        for slot, token_ids, num_prompt_tokens in plan.slot_resets:
            self.sampled[slot] = Counter(token_ids[num_prompt_tokens:])
        all_local = self.window and not self.has_both
        self._move_pages(plan, self.kv, self.host, is_local=all_local)
        if self.has_both:
            self._move_pages(plan, self.local_kv, self.local_host, is_local=True)
        layout = PackedLayout(batch.bucket, self.pages_per_seq, VOCAB, self.has_both)
        views = layout.views(batch)
        row_of_token = np.repeat(np.arange(batch.bucket.num_seqs), np.diff(views["cu_q_lens"]))
        num_tokens = len(row_of_token)
        last = self.last_token_ids[views["seq_slots"][row_of_token]]
        from_last = views["from_last"][:num_tokens].astype(bool)
        tokens = np.where(from_last, last, views["token_ids"][:num_tokens])
        assert (tokens >= 0).all(), "a token was taken that nobody sampled"
        assert not views["slot_mapping"][num_tokens:].any(), "padding must write to the null page"
        assert (views["slot_mapping"][:num_tokens] >= self.page_size).all()
        self.kv[views["slot_mapping"][:num_tokens]] = tokens
        if self.has_both:
            assert not views["local_slot_mapping"][num_tokens:].any()
            assert (views["local_slot_mapping"][:num_tokens] >= self.page_size).all()
            self.local_kv[views["local_slot_mapping"][:num_tokens]] = tokens
            self._compare_kinds(views, row_of_token, views["positions"][:num_tokens])
        sampler = batch.bucket.sampler
        if batch.bucket.kind == "draft":
            ends = views["positions"][:num_tokens] + 1
            return [self._sample(views, sampler, t, i, ends[t]) for t, i in enumerate(row_of_token)]
        ends = views["kv_lens"]
        return [self._sample(views, sampler, i, i, ends[i]) for i in range(len(plan.rows))]

    def _move_pages(self, plan: StepPlan, kv: np.ndarray, host: dict, *, is_local: bool) -> None:
        pages = kv.reshape(-1, self.page_size)
        for move in plan.page_moves:
            self._move(move, pages, host, list(move.local_ids if is_local else move.page_ids))
        copies = plan.local_copies if is_local else plan.page_copies
        if copies:
            sources, targets = np.array(copies).T
            assert not set(sources) & set(targets)
            pages[targets] = pages[sources]
        if is_local:
            assert len(copies) == len(plan.page_copies)
            pages[0] = -1  # pages without local ones were moved through it

    def _move(self, move: PageMove, pages: np.ndarray, host: dict, page_ids: list[int]) -> None:
        if move.kind == "out":
            assert move.seq_id not in host
            host[move.seq_id] = pages[page_ids].copy()
            return
        kept = host[move.seq_id] if move.kind == "fill" else host.pop(move.seq_id)
        if move.kind == "fill":
            for row, page_id in enumerate(page_ids):
                pages[page_id or 0] = kept[row] if page_id else pages[0]
        elif move.kind == "in":
            last = move.first + len(page_ids)
            assert last <= len(kept) or not page_ids
            pages[page_ids] = kept[move.first : last]

    def _compare_kinds(self, views, row_of_token, positions):
        """Of the KV that each token's window holds, both kinds of pages have the same."""
        for row, position in zip(row_of_token, positions, strict=True):
            places = np.arange(max(position - self.window + 1, 0), position + 1)
            indices, offsets = places // self.page_size, places % self.page_size
            seen = [
                kv[views[table][row, indices] * self.page_size + offsets]
                for kv, table in ((self.kv, "page_table"), (self.local_kv, "local_page_table"))
            ]
            assert (seen[0] == seen[1]).all(), "a local page is wrong or was given away too soon"

    def _sample(self, views, sampler, i, row, end):
        first = max(end - self.window, 0) if self.window and not self.has_both else 0
        places = np.arange(first, end)
        pages = views["page_table"][row, places // self.page_size]
        prefix = self.kv[pages * self.page_size + places % self.page_size]
        assert (prefix >= 0).all(), "a row sees a place that was never written"
        slot = views["sample_slots"][i]
        bias, allowed, penalty = [], np.arange(VOCAB), 0.0
        if sampler in ("masked", "full", "scored"):
            used = views["bias_values"][i] != 0
            bias = list(zip(views["bias_ids"][i][used], views["bias_values"][i][used], strict=True))
            words = views["banned"][i].view(np.uint8)
            allowed = np.flatnonzero(~np.unpackbits(words, bitorder="little")[:VOCAB].astype(bool))
        if sampler in ("full", "scored"):
            penalty = views["presence_penalty"][i]
        token = self.pick(prefix.tolist(), bias, allowed, penalty, self.sampled[slot])
        self.last_token_ids[slot] = token
        if sampler in ("full", "scored") and views["counts_row"][i]:
            self.sampled[slot][token] += 1
        return token


def generate_alone(
    request: Request, max_model_len: int, pick=pick, window: int = 0
) -> tuple[list[int], str, int | None]:
    """What a request gets without pages, batches or a scheduler: tokens and how it ended."""
    params, tokens = request.params, list(request.prompt_token_ids)
    num_prompt = len(tokens)
    stops = [*request.eos_token_ids, *params.stop_token_ids]
    while len(tokens) < min(num_prompt + request.max_tokens, max_model_len):
        num_sampled = len(tokens) - num_prompt
        bias = list((params.logit_bias or {}).items())
        bias += [(token, -np.inf) for token in request.banned_ids]
        if num_sampled < params.min_tokens:
            bias += [(token, -np.inf) for token in stops]
        for run in request.banned_runs:
            if tuple(tokens[-len(run) + 1 :]) == run[:-1]:
                bias.append((run[-1], -np.inf))
        allowed = params.allowed_token_ids or range(VOCAB)
        sampled = set(tokens[num_prompt:])
        seen = tokens[-window:]
        token = pick(seen, bias, list(allowed), params.presence_penalty, sampled)
        tokens.append(token)
        if token in request.eos_token_ids and not params.ignore_eos:
            return tokens[num_prompt:], "stop", None
        if token in params.stop_token_ids:
            return tokens[num_prompt:], "stop", token
    return tokens[num_prompt:], "length", None


@dataclass
class Loop:
    """The engine's loop, one step ahead of the device, with all bookkeeping checked each step."""

    scheduler: Scheduler
    max_in_flight: int = 2
    has_both: bool = False  # of pages and local pages
    num_steps: int = 0
    in_flight: deque = field(default_factory=deque)
    guess: Callable[[Sequence, int], tuple[int, ...]] | None = None  # as a draft model does

    def __post_init__(self):
        limits, pool = self.scheduler.limits, self.scheduler.pool
        width = -(-limits.max_model_len // pool.page_size)
        local = self.scheduler.local
        sizes = width, pool.page_size, limits.max_num_seqs, VOCAB
        self.builder = BatchBuilder(*sizes, {}, local, self.has_both)
        sizes = limits.max_num_seqs, limits.max_num_batched_tokens
        self.ladder = default_ladder("cpu", *sizes, speculation=limits.speculation)
        sizes = pool.num_pages, pool.page_size, limits.max_num_seqs, width
        if local is not None:
            sizes += local.window, local.pool.num_pages, self.has_both
        self.device = FakeDevice(*sizes)

    def step(self) -> list[Sequence]:
        """Dispatch a step, then commit the oldest one that the device was given before."""
        plan = self.scheduler.schedule()
        self.num_steps += 1
        self.scheduler.check()
        if plan:
            for i, drafted in plan.drafts.items() if self.guess else ():
                plan.drafts[i] = self.guess(plan.columns.seqs[i], len(drafted))
            batch = self.builder.build(plan, self.ladder.choose(plan))
            tokens = self.device.run(plan, batch)
            self.in_flight.append((plan, tokens))
        changed = []
        if self.in_flight and (not plan or len(self.in_flight) >= self.max_in_flight):
            changed = self.commit()
        else:
            assert plan or not self.scheduler.has_work, "nothing runs and nothing can"
        self.scheduler.check()
        return changed

    def commit(self) -> list[Sequence]:
        plan, tokens = self.in_flight.popleft()
        sampled = [
            token if row.samples else None for row, token in zip(plan.rows, tokens, strict=False)
        ]
        if plan.drafts:
            sampled = _verified(plan, tokens)
        return [plan.columns.seqs[i] for i in self.scheduler.commit(plan, sampled)]

    def run(self, seqs=(), max_steps=2000) -> None:
        """Until nothing is left to do."""
        for seq in seqs:
            self.scheduler.add(seq)
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"still {self.scheduler.num_running} running after {max_steps} steps")


def _verified(plan: StepPlan, tokens: list[int]) -> list[int | list[int]]:
    sampled, first = [], 0
    for i, row in enumerate(plan.rows):
        drafted, own = plan.drafts.get(i), tokens[first : first + row.q_len]
        first += row.q_len
        right = count_right(drafted or (), own)
        sampled.append(own[0] if drafted is None else own[: right + 1])
    return sampled


def outcome(seq: Sequence) -> tuple[list[int], str | None, int | str | None]:
    assert seq.state is SeqState.FINISHED
    return seq.output_token_ids, seq.finish_reason, seq.stop_reason
