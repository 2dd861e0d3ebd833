"""/v1/batches: each line answered once, bad files refused, ends, behind what is live."""

import asyncio
import errno
import gc
import json
import threading
import time
from dataclasses import replace

import openai
import pytest

from jaxpaged.core.policies import BACKGROUND
from jaxpaged.generate.output import OutputFailed, OutputFile
from server.auth import ApiKey
from server.batching import database, requests, runner
from server.batching.records import Batch
from server.batching.store import BatchStore
from server.limits import Limits
from tests.server.batching.conftest import KEYS, jsonl, line
from tests.server.conftest import CHAT, COMPLETIONS
from tests.server.test_protocol import until

PATH = "/v1/batches"


async def upload(client, *lines) -> str:
    return (await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")).id


async def made(client, *lines, endpoint=COMPLETIONS, window="24h", **more):
    file_id = await upload(client, *lines)
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    return await client.batches.create(**asked, **more)


async def ended(client, batch, *, within=10):
    async with asyncio.timeout(within):
        while (found := await client.batches.retrieve(batch.id)).status in (
            "validating", "in_progress", "finalizing", "cancelling",
        ):  # fmt: skip
            await asyncio.sleep(0.02)
    return found


async def records(client, file_id) -> list[dict]:
    content = await client.files.content(file_id)
    return [json.loads(row) for row in content.text.splitlines()]


def text_of(record) -> str:
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


async def test_the_official_client_gets_answers_and_errors(serve, client_of):
    client = client_of(await serve())
    batch = await made(
        client,
        line("a"),
        line("b", max_tokens=10**6),
        line("c", prompt="MNO", model="other"),
        line("d", prompt="MNO"),
        metadata={"k": "v"},
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"k": "v"})
    found = await ended(client, batch)
    assert found.status == "completed"
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
    assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at
    good = {r["custom_id"]: r for r in await records(client, found.output_file_id)}
    assert {name: text_of(record) for name, record in good.items()} == {"a": "DEF", "d": "PQR"}
    assert good["a"]["response"]["status_code"] == 200
    bad = {r["custom_id"]: r["error"] for r in await records(client, found.error_file_id)}
    assert set(bad) == {"b", "c"}
    assert "max_tokens" in bad["b"]["message"]
    assert bad["c"]["param"] == "model"
    kept = {file.id: file.purpose async for file in client.files.list()}
    assert kept[found.output_file_id] == kept[found.error_file_id] == "batch_output"
    assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]


async def test_chat_lines_are_answered(serve, client_of):
    client = client_of(await serve())
    chat = line("a", CHAT, messages=[{"role": "user", "content": "ABC"}])
    found = await ended(client, await made(client, chat, endpoint=CHAT))
    assert [text_of(r) for r in await records(client, found.output_file_id)] == ["DEF"]
    assert found.error_file_id is None


BAD_FILES = [
    (b"", "empty_file", "no line"),
    (b"\n\n", "empty_file", "no line"),
    (b"{broken\n", "invalid_line", "no valid JSON"),
    (b"\xff\xfe\n", "invalid_line", "no valid JSON"),
    (b"[" * 100_000, "invalid_line", "nested over 128"),
    (jsonl(line("a"), line("a")), "invalid_line", "stands in line 1"),
    (jsonl(line("a"), line("b", CHAT)), "invalid_line", "allowed: /v1/completions"),
    (jsonl(line("a") | {"method": "GET"}), "invalid_line", "method"),
    (jsonl(line("")), "invalid_line", "custom_id"),
    (jsonl(line("x" * 600)), "invalid_line", "custom_id"),
    (jsonl({"body": {}, "url": COMPLETIONS}), "invalid_line", "custom_id is missing"),
    (jsonl(line("a") | {"body": "x"}), "invalid_line", "body"),
    (jsonl(line("x" * 9 * 2**20)), "invalid_line", "bytes"),
]


async def test_a_file_with_a_bad_line_is_not_begun(serve, client_of):
    server = await serve(max_file=10**8)
    client = client_of(server)
    for data, code, told in BAD_FILES:
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        found = await ended(client, batch)
        assert (found.status, found.output_file_id) == ("failed", None), told
        error = found.errors.data[0]
        assert error.code == code
        assert told in error.message
        assert [path.name for path in server_files(server)] == [file.id]
        await client.files.delete(file.id)
    assert server.engine.num_steps == 0


def server_files(server):
    from server.batching.requests import RUNNER

    return server.app[RUNNER].store.path("x").parent.iterdir()


async def test_responses_are_answered_and_not_stored(serve, client_of):
    server = await serve()
    client = client_of(server)
    url, asked = "/v1/responses", {"input": "ABC", "prompt": None, "max_output_tokens": 3}
    lines = [line("a", url, **asked), line("b", url, previous_response_id="resp_1", **asked)]
    found = await ended(client, await made(client, *lines, endpoint=url))
    (answer,) = await records(client, found.output_file_id)
    body = answer["response"]["body"]
    assert (body["object"], body["output"][0]["content"][0]["text"]) == ("response", "DEF")
    assert server.engine.last_request.priority == BACKGROUND
    assert (await server.get(f"{url}/{body['id']}")).status == 404
    (refused,) = await records(client, found.error_file_id)
    assert refused["error"]["param"] == "previous_response_id"


async def test_a_cancelled_batch_keeps_what_was_answered(serve, client_of):
    server = await serve()
    client = client_of(server)
    slow = [line(f"slow-{i}", max_tokens=1500) for i in range(3)]
    batch = await made(client, line("quick"), *slow)
    server.engine.before_step = lambda step: time.sleep(0.01)
    while not server.engine.num_steps > 6:
        await asyncio.sleep(0.01)
    with pytest.raises(openai.BadRequestError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    statuses = {(await client.batches.cancel(batch.id)).status for _ in range(2)}
    assert statuses <= {"cancelling", "cancelled"}
    found = await ended(client, batch)
    assert found.status == "cancelled"
    assert found.cancelling_at <= found.cancelled_at
    assert [r["custom_id"] for r in await records(client, found.output_file_id)] == ["quick"]
    assert (found.request_counts.total, found.request_counts.completed) == (4, 1)
    async with asyncio.timeout(2):
        while server.engine.load_size:
            await asyncio.sleep(0.01)
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    assert (await client.files.delete(batch.input_file_id)).deleted


async def test_what_is_not_answered_in_its_window_is_told(serve, client_of, monkeypatch):
    monkeypatch.setattr(Batch, "seconds_left", 3.0)
    server = await serve()
    server.engine.before_step = lambda step: time.sleep(0.02)
    client = client_of(server)
    batch = await made(client, line("quick"), line("slow", max_tokens=1500))
    found = await ended(client, batch)
    assert found.status == "expired"
    assert [r["custom_id"] for r in await records(client, found.output_file_id)] == ["quick"]
    (late,) = await records(client, found.error_file_id)
    assert (late["custom_id"], late["error"]["code"]) == ("slow", "batch_expired")
    assert (found.request_counts.completed, found.request_counts.failed) == (1, 1)
    with pytest.raises(openai.BadRequestError, match="expired"):
        await client.batches.cancel(batch.id)


async def test_what_a_batch_leaves_expires_when_it_says(serve, client_of):
    client = client_of(await serve())
    after = {"anchor": "created_at", "seconds": 7200}
    lines = [line("a"), line("b", max_tokens=10**6)]
    found = await ended(client, await made(client, *lines, output_expires_after=after))
    for file_id in (found.output_file_id, found.error_file_id):
        file = await client.files.retrieve(file_id)
        assert file.expires_at == file.created_at + 7200
    assert (await client.files.retrieve(found.input_file_id)).expires_at is None


async def test_a_line_may_say_how_long_it_takes_at_most(serve, client_of):
    server = await serve()
    server.engine.before_step = lambda step: time.sleep(0.02)
    client = client_of(server)
    slow = {"max_tokens": 1500, "timeout_s": 0.2}
    lines = [line("quick", timeout_s=60.0), line("slow", **slow), line("bad", timeout_s=-1)]
    found = await ended(client, await made(client, *lines))
    assert [r["custom_id"] for r in await records(client, found.output_file_id)] == ["quick"]
    errors = {r["custom_id"]: r["error"] for r in await records(client, found.error_file_id)}
    assert errors["slow"]["code"] == "timeout"
    assert "timeout_s of 0.2 s has passed" in errors["slow"]["message"]
    assert (errors["bad"]["code"], errors["bad"]["param"]) == ("invalid_request", "timeout_s")


async def test_lines_are_in_the_background_and_wait_for_what_is_live(serve, client_of):
    server = await serve(api_keys=KEYS)
    client = client_of(server, "one")
    idle = server.engine.metrics.load
    server.engine.metrics.load = replace(idle, num_waiting=1)
    server.engine._publish = lambda num_new: None
    batch = await made(client, line("a", priority=-5))
    await asyncio.sleep(0.2)
    assert server.engine.num_steps == 0
    server.engine.metrics.load = idle
    assert (await ended(client, batch)).status == "completed"
    assert server.engine.last_request.priority == BACKGROUND
    assert server.engine.last_request.key_name == KEYS[0].key_id


async def test_lines_leave_half_of_every_limit_to_what_is_live(serve, client_of):
    keys = (ApiKey("k", ApiKey.of("one").digest, "user", Limits(10, None)),)
    server = await serve(api_keys=keys)
    client = client_of(server, "one")
    batch = await made(client, *[line(f"{i}") for i in range(8)])
    await asyncio.sleep(0.3)
    reply = await server.post({"prompt": "A"}, headers={"Authorization": "Bearer one"})
    assert (reply.status, reply.headers["x-ratelimit-remaining-requests"]) == (200, "3")
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"


async def test_a_batch_whose_key_was_taken_away_is_not_answered(serve, client_of):
    server = await serve(api_keys=KEYS)
    batch = await made(client_of(server, "one"), line("a", max_tokens=1500))
    server.app[requests.RUNNER]._limits_of = lambda key_id: None
    found = await ended(client_of(server, "root"), batch)
    assert (found.status, found.errors.data[0].code) == ("failed", "unknown_key")


async def test_what_a_caller_that_is_cancelled_asked_for_is_done(tmp_path):
    store, gate, closed = BatchStore(tmp_path / "batches", 1, 1), threading.Event(), []
    first, second = (
        asyncio.create_task(store.run(work)) for work in (gate.wait, lambda: closed.append(1))
    )
    await asyncio.sleep(0)
    second.cancel()
    gate.set()
    await asyncio.gather(first, second, return_exceptions=True)
    store.close()
    assert closed == [1]


async def test_a_client_that_leaves_before_its_batch_is_refused_is_no_error(serve, caplog):
    server = await serve()
    gate, store = threading.Event(), server.app[requests.RUNNER].store
    blocking = asyncio.create_task(store.run(gate.wait))
    body = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    leaving = asyncio.create_task(server.post(body, PATH))
    await until(lambda: store._thread._work_queue.qsize() == 1)
    leaving.cancel()
    await until(lambda: server.state.num_working == 0)
    gate.set()
    await blocking
    assert (await server.post(body, PATH)).status == 400
    gc.collect()
    assert all(record.levelname != "ERROR" for record in caplog.records)


async def test_a_full_disk_holds_a_batch_up_and_loses_nothing(serve, client_of, monkeypatch):
    client = client_of(await serve())
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    write, left = OutputFile.write, [1, 0, 0, 1, 0]

    def sometimes_full(self, record):
        if left and left.pop():
            self._take_back(self._file.tell())
            raise OutputFailed("full") from OSError(errno.ENOSPC, "on purpose")
        write(self, record)

    monkeypatch.setattr(OutputFile, "write", sometimes_full)
    found = await ended(client, await made(client, *[line(f"{i}") for i in range(9)]))
    assert (found.status, left) == ("completed", [])
    names = [r["custom_id"] for r in await records(client, found.output_file_id)]
    assert sorted(names) == [f"{i}" for i in range(9)]


async def test_only_the_latest_batches_of_a_key_are_kept(serve, client_of, monkeypatch):
    monkeypatch.setattr(database, "MAX_BATCHES", 2)
    client = client_of(await serve())
    ids = [(await ended(client, await made(client))).id for _ in range(4)]
    assert [batch.id async for batch in client.batches.list()] == ids[:1:-1]


async def test_a_line_whose_answer_breaks_fails_alone(serve, client_of, monkeypatch):
    client = client_of(await serve())
    from server.batching import answers

    whole = answers.answer_body

    async def broken(engine, body, **rest):
        if body["prompt"] == "bad":
            raise TypeError("broken on purpose")
        return await whole(engine, body, **rest)

    monkeypatch.setattr(answers, "answer_body", broken)
    found = await ended(client, await made(client, line("a", prompt="bad"), line("b")))
    assert (found.request_counts.completed, found.request_counts.failed) == (1, 1)
    (record,) = await records(client, found.error_file_id)
    assert record["error"]["code"] == "server_error"
    assert "purpose" not in record["error"]["message"]


NO_BATCHES = [
    ({"endpoint": "/v1/nope"}, "endpoint"),
    ({"endpoint": None}, "endpoint"),
    ({"completion_window": "24"}, "completion_window"),
    ({"completion_window": "0h"}, "completion_window"),
    ({"completion_window": "99d"}, "completion_window"),
    ({"completion_window": "\u0662h"}, "completion_window"),
    ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
    ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
    ({"input_file_id": "x" * 10**6}, "input_file_id"),
    ({"input_file_id": 7}, "input_file_id"),
    ({"input_file_id": "a\x00b"}, "input_file_id"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 9}}, "output_expires_after"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
    ({"output_expires_after": 3600}, "output_expires_after"),
]


async def test_what_is_no_batch_is_refused_by_name(serve, client_of):
    server = await serve()
    file_id = await upload(client_of(server), line("a"))
    good = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for more, param in NO_BATCHES:
        reply = await server.post(good | more, PATH)
        assert reply.status == 400, more
        assert (reply.error["param"] or "").startswith(param)
    assert (await server.get(PATH)).body["data"] == []


async def test_a_key_sees_its_own_and_an_admin_all(serve, client_of):
    server = await serve(api_keys=KEYS)
    one, two, root = (client_of(server, key) for key in ("one", "two", "root"))
    batch = await ended(one, await made(one, line("a")))
    for client, status in ((two, openai.NotFoundError), (root, None)):
        asks = [
            lambda client=client: client.batches.retrieve(batch.id),
            lambda client=client: client.files.retrieve(batch.input_file_id),
            lambda client=client: client.files.content(batch.output_file_id),
        ]
        for ask in asks:
            if status is None:
                await ask()
            else:
                with pytest.raises(status):
                    await ask()
    for ask in (two.batches.cancel, two.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(batch.id if ask == two.batches.cancel else batch.input_file_id)
    with pytest.raises(openai.BadRequestError, match="no file"):
        await two.batches.create(
            input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
        )
    listed = [[b.id async for b in client.batches.list()] for client in (one, two, root)]
    assert listed == [[batch.id], [], [batch.id]]
    files = [len([f async for f in client.files.list()]) for client in (one, two, root)]
    assert files == [2, 0, 2]
