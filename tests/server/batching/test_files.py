"""/v1/files: streamed to the disk, listed in pages, refused when too large or full or odd."""

import asyncio
import errno
import io
import os
import socket
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import openai
import pytest
from yarl import URL

from jaxpaged.errors import ConfigError
from server import state
from server.batching import store as store_module
from server.batching.database import Database
from server.batching.records import StoredFile
from server.batching.requests import RUNNER
from server.batching.store import BatchStore
from server.state import ServerLimits
from tests.server.test_protocol import until
from tests.server.test_slow_clients import connect, num_open

PATH = "/v1/files"


def form(*parts: tuple[str, str | None, bytes]) -> dict:
    """Keywords of a post with a form of (name, file name, content)."""
    body = b""
    for name, filename, content in parts:
        more = "" if filename is None else f'; filename="{filename}"'
        body += f'--xx\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        body += content + b"\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=xx"}
    return {"data": body + b"--xx--\r\n", "headers": headers}


PURPOSE = ("purpose", None, b"batch")


def left(server) -> list[str]:
    """Names of what is on the disk, uploads that have not ended included."""
    files = server.app[RUNNER].store.path("x").parent
    return [path.name for folder in (files, files.parent / "uploads") for path in folder.iterdir()]


async def test_the_official_client_keeps_reads_and_deletes(serve, client_of):
    server = await serve()
    client = client_of(server)
    file = await client.files.create(file=("in.jsonl", b"abc\n" * 1000), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (4000, "in.jsonl", "batch")
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == b"abc\n" * 1000
    assert left(server) == [file.id]
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    assert left(server) == []


async def upload(server, content: bytes) -> str:
    sent = form(PURPOSE, ("file", "a", content))
    reply = await server.send("POST", PATH, **sent | {"data": io.BytesIO(sent["data"])})
    return f"{PATH}/{reply.body['id']}/content"


async def test_a_file_is_sent_whole_whatever_part_of_it_is_asked_for(serve):
    server = await serve()
    content = bytes(range(256)) * 3000
    path = await upload(server, content)
    for headers in ({}, {"Range": "bytes=9999999-"}, {"If-Match": '"x"'}, {"If-None-Match": "*"}):
        reply = await server.get(path, headers=headers)
        assert (reply.status, reply.raw) == (200, content)
    assert (await server.get(await upload(server, b""))).raw == b""


async def test_a_client_that_does_not_read_its_file_is_cut_and_holds_none_open(serve):
    server = await serve(max_file=2**25, max_key=2**26, limits=ServerLimits(write_timeout_s=0.3))
    path = await upload(server, b"x" * 2**24)
    before = set(os.listdir("/proc/self/fd"))
    clients = [await connect(server, reads=False) for _ in range(5)]
    for _, writer in clients:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await until(lambda: num_open(server) >= 5)
    await asyncio.sleep(0.1)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2 * len(clients) + 1
    await until(lambda: num_open(server) <= 1, 5.0)
    for _, writer in clients:
        writer.close()


async def test_a_file_that_is_deleted_under_its_reader_is_a_404_or_cut(serve, monkeypatch):
    server = await serve(max_file=2**25, max_key=2**26)
    path = await upload(server, b"x" * 2**24)
    file = server.app[RUNNER].store.path(left(server)[0])
    reader, writer = await connect(server)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readexactly(1000)
    file.unlink()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(2**24)
    assert (await server.get(path)).error["code"] == "file_not_found"
    writer.close()


async def test_a_file_whose_time_is_over_is_forgotten(serve, client_of, monkeypatch):
    server = await serve()
    client, store = client_of(server), server.app[RUNNER].store
    after = {"anchor": "created_at", "seconds": 3600}
    brief = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=after)
    stays = await client.files.create(file=("b", b"x"), purpose="batch")
    assert (brief.expires_at, stays.expires_at) == (brief.created_at + 3600, None)
    await store.delete_expired()
    assert sorted(left(server)) == sorted([brief.id, stays.id])
    later = SimpleNamespace(time=lambda: brief.created_at + 3600)
    monkeypatch.setattr(store_module, "time", later)
    await store.delete_expired()
    assert left(server) == [stays.id]
    assert [file.id async for file in client.files.list()] == [stays.id]


async def test_a_folder_of_a_server_that_knew_no_expiry_is_read(tmp_path):
    store = BatchStore(tmp_path, 10**6, 10**7)
    upload = store.start_upload("key")
    file = await upload.keep("a", None)
    await upload.drop()
    store.close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db, db:
        db.execute("ALTER TABLE files DROP COLUMN expires_at")
        db.execute("ALTER TABLE batches DROP COLUMN output_expires_s")
        db.execute("PRAGMA user_version = 1")
    store = BatchStore(tmp_path, 10**6, 10**7)
    assert await store.run(store.db.get, StoredFile, file.file_id, None) == file
    store.close()


async def test_lists_come_in_pages_newest_first(serve, client_of):
    client = client_of(await serve())
    ids = [(await client.files.create(file=(str(i), b"x"), purpose="batch")).id for i in range(5)]
    assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in client.files.list(order="asc", after=ids[1])] == ids[2:]
    assert [file.id async for file in client.files.list(purpose="other")] == []


NAMES = ["../../etc/passwd", "/etc/passwd", "..", "a\\b", "%2e%2e%2f", "\u202egnp", "x.gz", "CON"]


async def test_a_files_name_is_only_shown(serve):
    server = await serve()
    for name in NAMES:
        reply = await server.send("POST", PATH, **form(PURPOSE, ("file", name, b"x")))
        assert reply.status == 200, name
        assert left(server) == [reply.body["id"]]
        await server.send("DELETE", f"{PATH}/{reply.body['id']}")


def expiry(seconds: bytes):
    anchor = ("expires_after[anchor]", None, b"created_at")
    return anchor, ("expires_after[seconds]", None, seconds)


NO_UPLOADS = [
    ([("file", "a", b"x")], "purpose is missing"),
    ([("purpose", None, b"fine-tune"), ("file", "a", b"x")], "only 'batch'"),
    ([("purpose", None, b"\xff" * 900), ("file", "a", b"x")], "only 'batch'"),
    ([PURPOSE], "file is missing"),
    ([PURPOSE, ("file", "a", b"x"), ("file", "b", b"x")], "two files"),
    ([PURPOSE, ("file", "n" * 300, b"x")], "name"),
    ([("purpose", None, b"b" * 5000), ("file", "a", b"x")], "bytes"),
    ([("x", None, b"")] * 30, "parts"),
    ([PURPOSE, ("expires_after[seconds]", None, b"9"), ("file", "a", b"x")], "anchor is ''"),
    ([PURPOSE, *expiry(b"9"), ("file", "a", b"x")], "allowed are 3600 to 2592000"),
    ([PURPOSE, *expiry(b"\xb2"), ("file", "a", b"x")], "seconds is 0"),
]


async def test_what_is_no_upload_is_refused_and_leaves_nothing(serve):
    server = await serve()
    for parts, told in NO_UPLOADS:
        reply = await server.send("POST", PATH, **form(*parts))
        assert reply.status == 400, told
        assert told in reply.error["message"]
    assert left(server) == []


BROKEN_FORMS = [
    (b"{}", "application/json"),
    (b"", "multipart/form-data"),
    (b"", "multipart/form-data; boundary=xx"),
    (b"nonsense" * 100, "multipart/form-data; boundary=xx"),
    (b"--xx\r\nContent-Disposition: x\r\n\r\n--xx--\r\n", "multipart/form-data; boundary=xx"),
    (b"--xx\r\n" + b"A: b\r\n" * 999, "multipart/form-data; boundary=xx"),
    (b"--xx\r\n" + b"A" * 99_999, "multipart/form-data; boundary=xx"),
    (form(PURPOSE, ("file", "a", b"x"))["data"][:-9], "multipart/form-data; boundary=xx"),
    (
        b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\n\r\n--y--\r\n--x--",
        "multipart/form-data; boundary=x",
    ),
    (
        b"--xx\r\nContent-Disposition: form-data; name=file\r\nContent-Encoding: gzip\r\n\r\nx"
        b"\r\n--xx--",
        "multipart/form-data; boundary=xx",
    ),
]


async def test_a_broken_form_is_refused_and_leaves_nothing(serve):
    server = await serve()
    for data, kind in BROKEN_FORMS:
        reply = await server.send("POST", PATH, data=data, headers={"Content-Type": kind})
        assert reply.status == 400, (data, reply.raw)
    assert left(server) == []


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_file_over_the_limit_is_a_413(serve, is_told):
    server = await serve(max_file=10**5)
    given = form(PURPOSE, ("file", "a", b"x" * 2 * 10**5))
    data = given["data"]

    async def pieces():
        for start in range(0, len(data), 10_000):
            yield data[start : start + 10_000]

    if not is_told:
        given["data"] = pieces()
    reply = await server.send("POST", PATH, **given)
    assert (reply.status, left(server)) == (413, [])
    assert "--max-batch-file-bytes" in reply.error["message"]


async def test_a_key_may_not_keep_more_than_its_share(serve, client_of):
    server = await serve(max_key=1000)
    client = client_of(server)
    first = await client.files.create(file=("a", b"x" * 800), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="delete some") as caught:
        await client.files.create(file=("b", b"x" * 300), purpose="batch")
    assert (caught.value.status_code, left(server)) == (413, [first.id])
    await client.files.delete(first.id)
    await client.files.create(file=("b", b"x" * 300), purpose="batch")


async def test_a_key_may_not_send_too_many_at_a_time(serve, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_UPLOADS", 1)
    server = await serve()
    store = server.app[RUNNER].store
    other = store.start_upload("")
    assert (await server.send("POST", PATH, **form(PURPOSE, ("file", "a", b"x")))).status == 429
    await other.drop()
    for _ in range(2):
        reply = await server.send("POST", PATH, **form(PURPOSE, ("file", "a", b"x")))
        assert reply.status == 200


async def test_a_client_that_leaves_leaves_nothing(serve):
    server = await serve()
    host, port = server.url.removeprefix("http://").split(":")
    data = form(PURPOSE, ("file", "a", b"x" * 10**6))["data"]
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: multipart/form-data; boundary=xx\r\n\r\n"
        connection.sendall(head.encode() + data[: len(data) // 2])
        async with asyncio.timeout(5):
            while not server.state.num_working:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        while server.state.num_working or left(server):
            await asyncio.sleep(0.01)


async def test_an_upload_that_drips_is_cut(serve):
    server = await serve(limits=ServerLimits(body_timeout_s=0.2))
    data = form(PURPOSE, ("file", "a", b"x" * 1000))["data"]

    async def drip():
        for place in range(0, len(data), 10):
            yield data[place : place + 10]
            await asyncio.sleep(0.05)

    reply = await server.send("POST", PATH, **form(PURPOSE) | {"data": drip()})
    assert (reply.status, left(server)) == (408, [])


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 503)]
)
async def test_a_disk_that_is_full_or_fails_is_told(serve, client_of, monkeypatch, number, status):
    server = await serve()
    client = client_of(server)

    def broken(self, data):
        raise OSError(number, "on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(store_module.Upload, "_append", broken)
        with pytest.raises(openai.InternalServerError, match="disk") as caught:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert caught.value.status_code == status
    assert left(server) == []
    await client.files.create(file=("a", b"x"), purpose="batch")


async def test_deleting_makes_the_room_that_noting_it_takes(serve, client_of, monkeypatch):
    """Else nobody could ever empty a full disk."""
    server = await serve()
    client, forget = client_of(server), Database.forget_files
    files = [await client.files.create(file=("a", b"x"), purpose="batch") for _ in range(2)]
    store = server.app[RUNNER].store

    def full(self, file_ids):
        if any(store.path(file_id).exists() for file_id in file_ids):
            raise OSError(errno.ENOSPC, "on purpose")
        forget(self, file_ids)

    monkeypatch.setattr(Database, "forget_files", full)
    await client.files.delete(files[0].id)
    monkeypatch.setattr(Database, "expired_files", lambda self, now: [files[1].id])
    await store.delete_expired()
    assert left(server) == []


NO_IDS = [
    "x",
    "..",
    "%2e%2e",
    "..%2fbatches.sqlite",
    "file-" + "0" * 32,
    "file-" + "0" * 5000,
    "%00",
    "%ff%fe",
    "%ED%A0%80",
    "file-" + "0" * 32 + "%0a",
]


async def test_an_id_that_is_none_is_a_404(serve):
    server = await serve()
    for given in NO_IDS:
        for method, rest in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            url = URL(f"{server.url}{PATH}/{given}{rest}", encoded=True)
            async with server.session.request(method, url) as response:
                assert response.status == 404


NO_PAGES = [
    "limit=0",
    "limit=-1",
    "limit=x",
    "limit=\u0663",
    "limit=1e9",
    "after=x",
    "order=up",
    "after=file-" + "0" * 32,
    "limit=" + "9" * 5000,
]


async def test_a_page_that_is_none_is_refused(serve):
    server = await serve()
    for query in NO_PAGES:
        assert (await server.get(f"{PATH}?{query}")).status == 400, query


async def test_without_a_folder_it_is_said(server):
    for path in (PATH, "/v1/batches"):
        reply = await server.get(path)
        assert reply.status == 404
        assert "--batch-dir" in reply.error["message"]


def test_a_folder_serves_one_server_and_is_swept(tmp_path):
    store = BatchStore(tmp_path, 1, 1)
    with pytest.raises(ConfigError, match="in use"):
        BatchStore(tmp_path, 1, 1)
    store.path("orphan").write_bytes(b"x")
    (tmp_path / "uploads" / "cut").write_bytes(b"x")
    store.close()
    again = BatchStore(tmp_path, 1, 1)
    assert not again.path("orphan").exists()
    assert not list((tmp_path / "uploads").iterdir())
    again.close()
    (tmp_path / "batches.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="sqlite cannot"):
        BatchStore(tmp_path, 1, 1)


async def test_an_upload_that_stands_still_does_not_hold_up_the_end(serve, monkeypatch):
    monkeypatch.setattr(state, "LATE_BODY_S", 0.2)
    server = await serve()
    data = form(PURPOSE, ("file", "a", b"x" * 1000))["data"]

    async def half():
        yield data[: len(data) // 2]
        await until(lambda: server.state.num_working == 1)
        server.state.drain()
        await asyncio.sleep(10)

    reply = await server.send("POST", PATH, **form(PURPOSE) | {"data": half()})
    assert (reply.status, left(server)) == (503, [])
    assert "shutting down" in reply.error["message"]
