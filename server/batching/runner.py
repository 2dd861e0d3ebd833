"""Answers batches: behind live traffic, each line once, on from where a crash cut them off."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from itertools import islice
from typing import Any

import msgspec

from jaxpaged.errors import CapacityError, EngineStopped, RateLimited
from jaxpaged.generate.job import MAX_TRIES, Record, answer_line, answered, error_record
from jaxpaged.generate.lines import BadLine, Line
from server.batching.answers import answer
from server.batching.output import SplitOutput, check_input, lines_of
from server.batching.records import OPEN, OUTPUT, Batch, Status, StoredFile, stamp
from server.batching.store import BatchStore, refusing
from server.errors import HttpError
from server.limits import NO_LIMITS, Limits
from server.state import ServerState

log = logging.getLogger(__name__)

LOOK_S = 0.05  # between two looks at whether live requests wait
READ_LINES = 64  # at once
TELL_S = 1.0  # between two notes of how far a batch is
RETRY_S = 20.0  # after the disk failed
SWEEP_S = 60.0  # between two looks for files whose time is over
MAX_ACTIVE = 2  # batches of one key that are worked on at a time
INTERNAL = "internal error; the server's log has the cause"
GONE = "the API key that made it is no key of this server any more"
SPARE = 0.5  # of rate limits, for live requests


class BatchRunner:
    """Owned by the event loop. `limits_of` knows a key by its id; None once it is no key."""

    def __init__(
        self,
        store: BatchStore,
        server: ServerState,
        limits_of: Callable[[str], Limits | None],
        max_inflight: int,
    ):
        self.store, self._server, self._limits_of = store, server, limits_of
        self._max_inflight, self._places = max_inflight, asyncio.Semaphore(max_inflight)
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_ACTIVE))
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on with what had not ended when the last server did."""
        for batch in await self.store.run(self.store.db.open_batches):
            self._begin(batch)
        self._tasks["sweep"] = asyncio.create_task(self._keep_sweeping())

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                await self.store.delete_expired()
            except HttpError as error:
                log.warning("files whose time is over stay: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def create(self, batch: Batch, owner: str | None) -> None:
        """Queue a batch of `owner`. Raises as `Database.add_batch`."""
        await self.store.run(self.store.db.add_batch, batch, owner)
        self._begin(batch)

    async def cancel(self, batch_id: str) -> Batch:
        """Stop a batch if it is not ending already; it as it is now."""
        froms = ("validating", "in_progress")
        batch = await self.store.run(self.store.db.move, batch_id, froms, **stamp("cancelling"))
        stop = self._stops.get(batch_id)
        if batch.status == "cancelling" and stop is not None:
            stop.set()
        return batch

    def _begin(self, batch: Batch) -> None:
        name = batch.batch_id
        stop = self._stops[name] = asyncio.Event()
        if batch.status == "cancelling":
            stop.set()
        task = self._tasks[name] = asyncio.create_task(self._keep_running(name, stop))
        task.add_done_callback(lambda _: (self._tasks.pop(name, None), self._stops.pop(name, None)))

    async def close(self) -> None:
        """Leave everything as it is, to be gone on with."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_running(self, name: str, stop: asyncio.Event) -> None:
        """Whatever the disk does, a batch goes on once it works again."""
        while True:
            try:
                batch = await self.store.run(self.store.db.get, Batch, name, None)
                assert batch is not None
                await self._run(batch, stop)
                return
            except HttpError as error:
                log.warning("%s waits %g s: %s", name, RETRY_S, error)
                await asyncio.sleep(RETRY_S)
            except EngineStopped:
                return  # the server ends; the next one goes on
            except Exception:  # a batch's failure is its own, likewise
                log.exception("%s", name)
                await self._fail(name, [{"code": "server_error", "message": INTERNAL}])
                return

    async def _fail(self, name: str, errors: list[dict[str, Any]]) -> None:
        told = msgspec.json.encode(errors).decode()
        await self.store.run(self.store.db.move, name, OPEN, **stamp("failed"), errors=told)

    async def _run(self, batch: Batch, stop: asyncio.Event) -> None:
        output = SplitOutput(self.store.path(batch.output_id), self.store.path(batch.error_id))
        try:
            await self.store.run(output.open)
            await self._until_stopped(batch, stop, self._answer_all(batch, output))
            await self._finish(batch, output)
        finally:
            await self.store.run(output.close)

    async def _until_stopped(
        self, batch: Batch, stop: asyncio.Event, work: Coroutine[Any, Any, None]
    ) -> None:
        """Work until it is done, the batch is cancelled, or its window has ended."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        try:
            if not stop.is_set():
                await asyncio.wait(
                    (task, stopped),
                    timeout=max(0.0, batch.seconds_left),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if task.done():
                await task
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _answer_all(self, batch: Batch, output: SplitOutput) -> None:
        store = self.store
        async with self._turns[batch.key_id]:
            if self._limits_of(batch.key_id) is None:
                return await self._fail(batch.batch_id, [{"code": "unknown_key", "message": GONE}])
            if batch.status == "validating" and not await self._is_valid(batch, output):
                return
            records = answered(
                self._lines(batch, output),
                lambda line: self._answer_line(batch, line),
                max_inflight=self._max_inflight,
                keep_order=False,
            )
            told_at = 0.0
            async with aclosing(records):
                async for ready in records:
                    await store.run(output.write, ready)
                    now = asyncio.get_running_loop().time()
                    if now > told_at + TELL_S:
                        told_at = now
                        await store.run(store.db.move, batch.batch_id, OPEN, **output.counts)

    async def _is_valid(self, batch: Batch, output: SplitOutput) -> bool:
        """Look at every line; a batch with a bad one is answered not at all."""
        path, name = self.store.path(batch.input_file_id), batch.batch_id
        with refusing():
            number, errors = await asyncio.to_thread(check_input, path, batch.endpoint)
        if errors:
            await self.store.run(output.close)
            await self._fail(name, errors)
        else:
            changes = stamp("in_progress") | {"num_total": number}
            await self.store.run(self.store.db.move, name, ("validating",), **changes)
        return not errors

    async def _lines(self, batch: Batch, output: SplitOutput) -> AsyncGenerator[Line | BadLine]:
        """Those that have no record yet."""
        lines = lines_of(self.store.path(batch.input_file_id), batch.endpoint)
        while True:
            with refusing():
                some = await asyncio.to_thread(list[Line | BadLine], islice(lines, READ_LINES))
            if not some:
                return
            for line in some:
                if not output.holds(line):
                    yield line

    async def _answer_line(self, batch: Batch, line: Line | BadLine) -> Record:
        async with self._places:
            try:
                record = await answer_line(line, lambda line: self._body(batch, line))
            except Exception as error:  # a line's failure is its own, as a request's is
                if isinstance(error, EngineStopped) and not self._server.engine.is_running:
                    raise
                log.exception("line %d of %s", line.number, batch.batch_id)
                return error_record(line.custom_id, "server_error", INTERNAL)
        if record["response"] is not None:
            usage: dict[str, int] = record["response"]["body"].get("usage") or {}
            limits = self._limits_of(batch.key_id) or NO_LIMITS
            self._server.rates.charge(usage.get("total_tokens", 0), batch.key_id, limits)
        return record

    async def _body(self, batch: Batch, line: Line) -> dict[str, Any]:
        """Ask until there is room; a line that loses its replica is asked again."""
        num_lost = 0
        while True:
            await self._wait_for_room(batch.key_id)
            try:
                return await answer(self._server, batch.endpoint, line.body, batch.key_id)
            except CapacityError as error:
                await asyncio.sleep(error.retry_after_s)
            except EngineStopped:
                num_lost += 1
                if num_lost == MAX_TRIES or not self._server.engine.is_running:
                    raise

    async def _wait_for_room(self, key_id: str) -> None:
        """Until no live request waits, and the limits of the key and of all leave enough."""
        server = self._server
        while True:
            while server.is_draining or server.engine.load.num_waiting:
                await asyncio.sleep(LOOK_S)
            try:
                return server.rates.admit(key_id, self._limits_of(key_id) or NO_LIMITS, SPARE)
            except RateLimited as error:
                await asyncio.sleep(error.retry_after_s)

    async def _finish(self, batch: Batch, output: SplitOutput) -> None:
        """Show what there is; a crash in between does it again."""
        store = self.store
        name, froms = batch.batch_id, ("validating", "in_progress")
        batch = await store.run(store.db.move, name, froms, **stamp("finalizing"))
        if batch.status == "failed":
            return
        final: Status = "expired"
        if batch.cancelling_at is not None:
            final = "cancelled"
        elif batch.in_progress_at is not None and output.num_done == batch.num_total:
            final = "completed"
        path = store.path(batch.input_file_id)
        if final == "expired" and batch.in_progress_at is not None and path.exists():
            await store.run(output.expire, lines_of(path, batch.endpoint))
        await store.run(output.close)
        ids, parts, now = (batch.output_id, batch.error_id), ("output", "error"), int(time.time())
        kept_s = batch.output_expires_s
        files = [
            StoredFile(
                file_id,
                batch.key_id,
                f"{name}_{part}.jsonl",
                OUTPUT,
                path.stat().st_size,
                now,
                None if kept_s is None else now + kept_s,
            )
            for file_id, part, path in zip(ids, parts, output.paths, strict=True)
            if path.exists()
        ]
        shown = {file.file_id for file in files}
        columns = stamp(final) | output.counts
        columns |= {"has_output": batch.output_id in shown, "has_errors": batch.error_id in shown}
        await store.run(store.db.finish, batch, files, columns)
        log.info("%s %s: %d answered, %d failed of %d", name, final, output.num_completed,
                 output.num_failed, batch.num_total)  # fmt: skip
