"""The SQLite file that knows files and batches. Everything here blocks: see `store.py`."""

import dataclasses
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError, RequestError
from server.batching.records import INPUT, OPEN, Batch, StoredFile
from server.errors import HttpError
from server.paging import Order, not_after

VERSION = 2  # 1 had fewer columns
MAX_FILES = 2000  # of one key
MAX_OPEN_BATCHES, MAX_BATCHES = 100, 10_000  # likewise
BUSY_S = 5.0

type Row = StoredFile | Batch

_TABLES = {StoredFile: ("files", "file_id"), Batch: ("batches", "batch_id")}


class Database:
    """Used by one thread at a time. An `owner` of None sees what belongs to any key."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        try:
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._make_tables(path)
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"--batch-dir: {path.name} cannot be used: {error}") from None

    def _make_tables(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= VERSION:
            raise ConfigError(
                f"--batch-dir: {path.name} has version {version}, this server reads {VERSION}: "
                "give another directory"
            )
        with self._db:
            for kind, (table, key) in _TABLES.items():
                names = [field.name for field in dataclasses.fields(kind)]
                columns = ", ".join(f"{name} UNIQUE" if name == key else name for name in names)
                self._db.execute(
                    f"CREATE TABLE IF NOT EXISTS {table} (number INTEGER PRIMARY KEY, {columns})"
                )
                known = {row["name"] for row in self._db.execute(f"PRAGMA table_info({table})")}
                for name in names:
                    if name not in known:
                        self._db.execute(f"ALTER TABLE {table} ADD COLUMN {name}")
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        self._db.close()

    def get[T: Row](self, kind: type[T], row_id: str, owner: str | None) -> T | None:
        """A file or batch, if there is one that `owner` may see."""
        table, key = _TABLES[kind]
        found = self._db.execute(f"SELECT * FROM {table} WHERE {key} = ?", (row_id,)).fetchone()
        if found is None or owner not in (None, found["key_id"]):
            return None
        return _row(kind, found)

    def page[T: Row](
        self,
        kind: type[T],
        owner: str | None,
        after: str | None,
        limit: int,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> list[T]:
        """At most `limit` rows after the one named, in the order of their making."""
        table, key = _TABLES[kind]
        wanted, values = ["1"], list[Any]()
        if owner is not None:
            wanted.append("key_id = ?")
            values.append(owner)
        if purpose is not None:
            wanted.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            if self.get(kind, after, owner) is None:
                raise not_after(after)
            sign = "<" if order == "desc" else ">"
            wanted.append(f"number {sign} (SELECT number FROM {table} WHERE {key} = ?)")
            values.append(after)
        found = self._db.execute(
            f"SELECT * FROM {table} WHERE {' AND '.join(wanted)} "
            f"ORDER BY number {order.upper()} LIMIT ?",
            (*values, limit),
        )
        return [_row(kind, row) for row in found]

    def check_room(self, key_id: str, num_bytes: int, max_bytes: int) -> None:
        """Whether a key may keep one more file of a size.

        Raises:
            HttpError: 413, it keeps too many or too much already.
        """
        number, used = self._db.execute(
            "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE key_id = ?", (key_id,)
        ).fetchone()
        if number >= MAX_FILES:
            raise HttpError(413, f"{number} files are kept for this key, the most: delete some")
        if used + num_bytes > max_bytes:
            raise HttpError(
                413,
                f"files of this key take {used} bytes, allowed are {max_bytes}: delete some first",
            )

    def add_file(self, file: StoredFile, max_bytes: int) -> None:
        self.check_room(file.key_id, file.num_bytes, max_bytes)
        with self._db:
            self._insert(file)

    def add_batch(self, batch: Batch, owner: str | None) -> None:
        """Queue a batch.

        Raises:
            RequestError: its input is not there, or no input.
            HttpError: 429, the key has too many that have not ended.
        """
        file = self.get(StoredFile, batch.input_file_id, owner)
        if file is None:
            raise RequestError(
                f"there is no file {batch.input_file_id[:100]!r}: upload it to /v1/files first",
                param="input_file_id",
            )
        if file.purpose != INPUT:
            raise RequestError(
                f"the file has the purpose {file.purpose}, it must be {INPUT}",
                param="input_file_id",
            )
        (number,) = self._db.execute(
            f"SELECT count(*) FROM batches WHERE key_id = ? AND {_status_in(OPEN)}",
            (batch.key_id, *OPEN),
        ).fetchone()
        if number >= MAX_OPEN_BATCHES:
            raise HttpError(429, f"{number} batches of this key have not ended: wait for one")
        with self._db:
            self._insert(batch)
            self._forget_oldest(batch.key_id)

    def _forget_oldest(self, key_id: str) -> None:
        """Keep only the latest batches of a key; those that have not ended are among them."""
        self._db.execute(
            "DELETE FROM batches WHERE key_id = ? AND number <= (SELECT number FROM batches "
            "WHERE key_id = ? ORDER BY number DESC LIMIT 1 OFFSET ?) AND NOT " + _status_in(OPEN),
            (key_id, key_id, MAX_BATCHES, *OPEN),
        )

    def unused_file(self, file_id: str, owner: str | None) -> StoredFile | None:
        """A file that may be forgotten; None if there is none that `owner` may see.

        Raises:
            RequestError: a batch that has not ended reads it.
        """
        file = self.get(StoredFile, file_id, owner)
        if file is None:
            return None
        user = self._db.execute(
            f"SELECT batch_id FROM batches WHERE input_file_id = ? AND {_status_in(OPEN)}",
            (file_id, *OPEN),
        ).fetchone()
        if user is not None:
            raise RequestError(
                f"the file is the input of {user[0]}, which has not ended: cancel it or wait"
            )
        return file

    def expired_files(self, now: int) -> list[str]:
        """The files whose time is over, but for those that a batch reads."""
        found = self._db.execute(
            "SELECT file_id FROM files WHERE expires_at <= ? AND file_id NOT IN (SELECT "
            f"input_file_id FROM batches WHERE {_status_in(OPEN)})",
            (now, *OPEN),
        )
        return [row[0] for row in found]

    def forget_files(self, file_ids: Iterable[str]) -> None:
        with self._db:
            self._db.executemany(
                "DELETE FROM files WHERE file_id = ?", [(file_id,) for file_id in file_ids]
            )

    def open_batches(self) -> list[Batch]:
        """Those that have not ended, oldest first."""
        found = self._db.execute(
            f"SELECT * FROM batches WHERE {_status_in(OPEN)} ORDER BY number", OPEN
        )
        return [_row(Batch, row) for row in found]

    def known_ids(self) -> set[str]:
        """Of all files, and of those that open batches are writing."""
        found = self._db.execute("SELECT file_id FROM files").fetchall()
        writing = [(batch.output_id, batch.error_id) for batch in self.open_batches()]
        return {row[0] for row in found}.union(*writing)

    def move(self, batch_id: str, froms: Sequence[str], **columns: Any) -> Batch:
        """Change a batch if it has one of the statuses `froms`; the batch as it is now."""
        with self._db:
            self._move(batch_id, froms, columns)
        found = self.get(Batch, batch_id, None)
        assert found is not None
        return found

    def finish(self, batch: Batch, files: Sequence[StoredFile], columns: dict[str, Any]) -> None:
        """End a batch, and show the files that it leaves, in one transaction."""
        with self._db:
            for file in files:
                self._insert(file)
            self._move(batch.batch_id, OPEN, columns)

    def _move(self, batch_id: str, froms: Sequence[str], columns: dict[str, Any]) -> None:
        changes = ", ".join(f"{name} = ?" for name in columns)
        self._db.execute(
            f"UPDATE batches SET {changes} WHERE batch_id = ? AND {_status_in(froms)}",
            (*columns.values(), batch_id, *froms),
        )

    def _insert(self, row: Row) -> None:
        values = dataclasses.asdict(row)
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        table = _TABLES[type(row)][0]
        self._db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


def _status_in(statuses: Sequence[str]) -> str:
    return f"status IN ({', '.join('?' * len(statuses))})"


def _row[T: Row](kind: type[T], found: sqlite3.Row) -> T:
    return kind(**{field.name: found[field.name] for field in dataclasses.fields(kind)})
