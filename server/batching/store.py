"""The folder of `--batch-dir`: contents as files, all else in SQLite; nothing blocks the loop."""

import asyncio
import contextlib
import errno
import fcntl
import os
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from jaxpaged.errors import ConfigError, RateLimited
from jaxpaged.generate.output import OutputFailed
from server.batching.database import Database
from server.batching.records import INPUT, StoredFile
from server.errors import HttpError

MAX_UPLOADS = 16  # of one key at a time
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


async def done_anyway[T](work: Awaitable[T]) -> T:
    """What `work` gives. A caller that is cancelled leaves it to be done, and its failure untold.

    `asyncio.shield` would log that failure, which may be the fault of a client that has gone.
    """
    future = asyncio.ensure_future(work)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait([future])
    return future.result()


class BatchStore:
    """Owned by the event loop; one thread does what blocks, one thing after the other."""

    def __init__(self, folder: Path, max_file_bytes: int, max_key_bytes: int):
        self.max_file_bytes, self.max_key_bytes = max_file_bytes, max_key_bytes
        self.num_uploads = Counter[str]()  # by key
        self._files, self._uploads = folder / "files", folder / "uploads"
        try:
            for made in (folder, self._files, self._uploads):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(folder / "lock")
        except BlockingIOError:
            raise ConfigError(
                f"--batch-dir {folder} is in use by another server: give each its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"--batch-dir {folder} cannot be used: {error.strerror}") from None
        try:
            self.db = Database(folder / "batches.sqlite")
            self._sweep()
        except BaseException:
            self._lock.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def _sweep(self) -> None:
        """Remove what a crash has left: uploads, and files between their rename and their row."""
        known = self.db.known_ids()
        for path in (*self._uploads.iterdir(), *self._files.iterdir()):
            if path.name not in known:
                path.unlink()

    async def run[**P, T](
        self, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
    ) -> T:
        """Do what blocks, after all that was asked before, also where nobody waits any more.

        A caller that is cancelled leaves it to be done: a file that is to be closed is closed.

        Raises:
            HttpError: 507, the disk is full; 503, it fails otherwise.
        """

        def call() -> T:
            with refusing():
                return work(*arguments, **keywords)

        return await done_anyway(asyncio.get_running_loop().run_in_executor(self._thread, call))

    def close(self) -> None:
        self._thread.shutdown()
        self.db.close()
        self._lock.close()

    def path(self, file_id: str) -> Path:
        """Where a file's content is. Ids are made here, never by a client."""
        return self._files / file_id

    def start_upload(self, key_id: str) -> "Upload":
        """A new file of a key. It must be dropped in the end, kept or not.

        Raises:
            RateLimited: the key sends too many at a time.
        """
        if self.num_uploads[key_id] >= MAX_UPLOADS:
            raise RateLimited(
                f"{MAX_UPLOADS} files of this key are on their way: send fewer at a time",
                retry_after_s=1.0,
            )
        self.num_uploads[key_id] += 1
        return Upload(self, self._uploads / uuid.uuid4().hex, key_id)

    async def delete(self, file_id: str, owner: str | None) -> bool:
        """Forget a file and its content; False if there is none that `owner` may see."""
        return await self.run(self._delete, file_id, owner)

    async def delete_expired(self) -> None:
        """Forget files whose time is over, but for inputs of batches that have not ended."""
        await self.run(lambda: self._forget(self.db.expired_files(int(time.time()))))

    def _delete(self, file_id: str, owner: str | None) -> bool:
        found = self.db.unused_file(file_id, owner)
        if found is not None:
            self._forget([file_id])
        return found is not None

    def _forget(self, file_ids: list[str]) -> None:
        for file_id in file_ids:  # first: on a full disk this gives the room to note it
            self.path(file_id).unlink(missing_ok=True)
        if file_ids:
            self.db.forget_files(file_ids)


def _locked(path: Path) -> BinaryIO:
    """The file, held by this process alone until it is closed.

    Raises:
        BlockingIOError: another one holds it.
    """
    file = path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


class Upload:
    """A file on its way in: it counts once `keep` has been called, and is gone after `drop`."""

    def __init__(self, store: BatchStore, path: Path, key_id: str):
        self._store, self._path, self._key_id = store, path, key_id
        self._file: BinaryIO | None = None
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        await self._store.run(self._append, data)

    async def keep(self, filename: str, seconds: int | None) -> StoredFile:
        """Count it from now on, for so many seconds or for good."""
        file_id, now = f"file-{uuid.uuid4().hex}", int(time.time())
        until = None if seconds is None else now + seconds
        file = StoredFile(file_id, self._key_id, filename, INPUT, self.num_bytes, now, until)
        await self._store.run(self._publish, file)
        return file

    async def drop(self) -> None:
        self._store.num_uploads[self._key_id] -= 1
        await self._store.run(self._forget)

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(data)

    def _publish(self, file: StoredFile) -> None:
        self._append(b"")
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        target = self._store.path(file.file_id)
        self._path.rename(target)
        try:
            self._store.db.add_file(file, self._store.max_key_bytes)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _forget(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk would not take
                self._file.close()
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def refusing():
    """What the disk cannot do becomes a refusal that a client can understand."""
    try:
        yield
    except sqlite3.OperationalError as error:
        is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
        raise _refusal(is_full, error.sqlite_errorname) from error
    except OutputFailed as error:
        raise _refusal(isinstance(error.__cause__, OSError) and _is_full(error.__cause__),
                       "the output") from error  # fmt: skip
    except OSError as error:
        raise _refusal(_is_full(error), error.strerror or "input and output") from error


def _is_full(error: OSError) -> bool:
    return error.errno in FULL


def _refusal(is_full: bool, what: str) -> HttpError:
    if is_full:
        return HttpError(507, "the server's disk for files and batches is full: try again later")
    return HttpError(503, f"the server's disk for files and batches fails ({what}): try again")
