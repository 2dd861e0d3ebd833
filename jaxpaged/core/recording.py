"""A scheduler's events in a file, and the same plans again without a device.

The scheduler is a function of its state and its events: sequences that come, ends from outside,
calls to plan, sampled tokens. Each is a line of JSON; a plan is recorded as its hash. The file
holds the prompts' and answers' token ids.
"""

import dataclasses
import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from jaxpaged.core.limits import SchedulerLimits
from jaxpaged.core.local_pages import LocalPages
from jaxpaged.core.page_pool import PagePool
from jaxpaged.core.plan import Sampled, StepPlan
from jaxpaged.core.prefix_cache import PrefixCache
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.sequence import Sequence
from jaxpaged.errors import ConfigError

FORMAT = 1


class RecordedScheduler:
    """A scheduler that writes down what is asked of it; all else is the scheduler's own."""

    def __init__(self, scheduler: Scheduler, file: Path):
        self._scheduler = scheduler
        self._plans: dict[int, int] = {}  # id of a plan that is not committed: its number
        self._num_plans = 0
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {file.name} cannot be written: {error.strerror}") from None
        self._file = os.fdopen(handle, "wb")
        weakref.finalize(self, self._file.close)  # an engine has no end but that nobody holds it
        self._write(
            "start",
            format=FORMAT,
            limits=scheduler.limits,
            num_pages=scheduler.pool.num_pages,
            page_size=scheduler.pool.page_size,
            window=scheduler.local.window if scheduler.local else 0,
            num_local_pages=scheduler.local.pool.num_pages if scheduler.local else 0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add(self, seq: Sequence) -> None:
        self._scheduler.add(seq)
        params = dataclasses.replace(seq.request.params, extra_args=None)
        left_out = {"page_hashes": (), "prompt_bytes": b"", "grammar": None}
        request = dataclasses.replace(seq.request, params=params, **left_out)
        fields = {"request": request, "has_grammar": seq.request.grammar is not None}
        self._write("add", seq_id=seq.seq_id, choice=seq.choice, **fields)

    def abort(self, seq: Sequence) -> None:
        self.finish(seq, "abort", None)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None) -> None:
        self._write("finish", seq_id=seq.seq_id, reason=reason)
        self._scheduler.finish(seq, reason, stop_reason)

    def reset_prefix_cache(self) -> None:
        self._write("reset_prefix_cache")
        self._scheduler.reset_prefix_cache()

    def drop_prefix(self, prefix_id: str) -> bool:
        self._write("drop_prefix", prefix_id=prefix_id)
        return self._scheduler.drop_prefix(prefix_id)

    def schedule(self) -> StepPlan:
        plan = self._scheduler.schedule()
        if plan:
            self._plans[id(plan)] = self._num_plans
        self._num_plans += 1
        self._write("plan", hash=plan_hash(plan), rows=plan.num_rows, tokens=plan.num_tokens)
        self._file.flush()
        return plan

    def commit(self, plan: StepPlan, sampled: Seq[Sampled], seconds: float = 0.0) -> list[int]:
        number = self._plans.pop(id(plan))
        self._write("commit", plan=number, sampled=sampled, seconds=seconds)
        return self._scheduler.commit(plan, sampled, seconds)

    def _write(self, event: str, **fields: object) -> None:
        self._file.write(_encoded({"event": event} | fields) + b"\n")


def _encoded(event: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(event)
    except UnicodeEncodeError:  # half a surrogate pair in a stop or a name; msgspec reads none back
        text = json.dumps(msgspec.to_builtins(event, str_keys=True), ensure_ascii=False)
        return text.encode("utf-8", "xmlcharrefreplace")


def plan_hash(plan: StepPlan) -> str:
    """Of who computes what on which pages; equal plans of two processes hash the same."""
    rows, digest = plan.columns, hashlib.blake2b(digest_size=8)
    for seq, slot, start, q_len, samples in zip(
        rows.seqs, rows.slots, rows.starts, rows.q_lens, rows.samples, strict=True
    ):
        digest.update(array("q", [seq.seq_id, slot, start, q_len, samples, -1]))
        digest.update(array("q", seq.page_ids))
    for f in dataclasses.fields(plan):
        if f.name != "columns":
            digest.update(repr(getattr(plan, f.name)).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Replay:
    """What a replay found. `mismatch` is the line of the first plan that came out differently."""

    num_plans: int
    num_preemptions: int
    mismatch: int | None


def replay(file: Path) -> Replay:
    """Give a fresh scheduler the recorded events and compare each plan's hash.

    Raises:
        ConfigError: the file is no record, or of another format.
    """
    events = _read(file)
    _, start = next(events, (1, dict[str, Any]()))
    if start.get("event") != "start" or start.get("format") != FORMAT:
        raise ConfigError(f"{file.name}: line 1 is not the start of a record of format {FORMAT}")
    player, mismatch = _Player(start), None
    for line, event in events:
        try:
            is_same = player.play(event)
        except (LookupError, TypeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{file.name}: line {line} cannot be played: {error!r}") from None
        if not is_same:
            mismatch = line
            break
    return Replay(player.num_plans, player.scheduler.num_preemptions, mismatch)


class _AnyGrammar:
    """Stands for a grammar: planning asks only whether there is one."""


class _Player:
    """A scheduler that lives through recorded events."""

    def __init__(self, start: dict[str, Any]):
        pool = PagePool(start["num_pages"], start["page_size"])
        limits = msgspec.convert(_with_admission(start["limits"]), SchedulerLimits)
        local = None
        if start.get("window"):
            local = LocalPages(pool, start["window"], start["num_local_pages"])
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool), local)
        self.num_plans = 0
        self._plans: dict[int, StepPlan] = {}  # not committed yet, by number
        self._seqs: dict[int, Sequence] = {}

    def play(self, event: dict[str, Any]) -> bool:
        """Apply one event; False for a plan whose hash is not the recorded one."""
        match event["event"]:
            case "add":
                request = msgspec.convert(event["request"], Request, str_keys=True)
                if event["has_grammar"]:
                    request = dataclasses.replace(request, grammar=cast("Any", _AnyGrammar()))
                prompt, seq_id = list(request.prompt_token_ids), event["seq_id"]
                seq = Sequence(seq_id, request, event["choice"], prompt, len(prompt))
                self._seqs[seq_id] = seq
                self.scheduler.add(seq)
            case "finish":
                self.scheduler.finish(self._seqs[event["seq_id"]], event["reason"], None)
            case "reset_prefix_cache":
                self.scheduler.reset_prefix_cache()
            case "drop_prefix":
                self.scheduler.drop_prefix(event["prefix_id"])
            case "plan":
                plan = self.scheduler.schedule()
                if plan:
                    self._plans[self.num_plans] = plan
                self.num_plans += 1
                return plan_hash(plan) == event["hash"]
            case "commit":
                seconds = event.get("seconds", 0.0)
                self.scheduler.commit(self._plans.pop(event["plan"]), event["sampled"], seconds)
            case other:
                raise LookupError(f"unknown event {other!r}")
        return True


def _with_admission(limits: dict[str, Any]) -> dict[str, Any]:
    """Limits of a record, from before there was foresight too."""
    admission = "no-evict" if limits.get("reserve_whole_answer") else "evict"
    return {"admission": admission} | limits


def _read(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and events; a last line that was cut off is left out."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                event = msgspec.json.decode(line)
                if not isinstance(event, dict):
                    raise ConfigError(f"{file.name}: line {number} is no event")
                yield number, event
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file.name} is no record: {error}") from None
