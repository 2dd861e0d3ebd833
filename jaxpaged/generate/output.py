"""The output file of a batch job: whole lines only, and what a resumed job finds done."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from jaxpaged.generate.lines import BadLine, Line

SYNC_EVERY = 64  # records between two forced writes to the disk


class OutputFailed(Exception):
    """The output cannot be written; nothing but whole lines is left in it."""


@dataclass
class Done:
    """What an earlier run has written."""

    custom_ids: set[str] = field(default_factory=set[str])
    failed_ids: set[str] = field(default_factory=set[str])  # of these, the ones without an answer
    line_numbers: set[int] = field(default_factory=set[int])  # of lines that were no requests

    def holds(self, line: Line | BadLine) -> bool:
        """Whether a line has its record."""
        if isinstance(line, BadLine):
            return line.number in self.line_numbers
        return line.custom_id in self.custom_ids

    def has_failed(self, line: Line | BadLine) -> bool:
        """Whether the record that a line has is of an error."""
        return isinstance(line, BadLine) or line.custom_id in self.failed_ids


class OutputFile:
    """Appends records. `path` None writes to `stream`, which cannot be resumed.

    What an earlier run left is there until the first record is written; a pipe or a device takes
    records as a stream does.
    """

    def __init__(self, path: Path | None, stream: BinaryIO, *, resume: bool):
        self._path, self._num_unsynced = path, 0
        self._is_kept = self._is_begun = False  # kept: half lines can be cut off, and it is synced
        self.done, self._file = Done(), stream
        if path is None:
            return
        try:
            self._is_kept = path.is_file() or not path.exists()
            if resume and self._is_kept and path.exists():
                self.done = _read_done(path)
            self._is_begun = resume
            self._file = path.open("ab")
        except OSError as error:
            raise OutputFailed(f"{path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the system.

        Raises:
            OutputFailed: the disk is full or gone; a half line is taken back.
        """
        line, start = msgspec.json.encode(record) + b"\n", None
        try:
            start = self._begin()
            self._file.write(line)
            self._file.flush()
            self._num_unsynced += 1
            if self._num_unsynced >= SYNC_EVERY:
                self._sync()
        except OSError as error:
            self._take_back(start)
            raise OutputFailed(f"{self._path or 'output'}: {error.strerror}") from error

    def close(self) -> None:
        if self._path is not None and not self._file.closed:  # else a full disk has
            try:
                self._begin()
                self._sync()
                self._file.close()
            except OSError as error:
                raise OutputFailed(f"{self._path}: {error.strerror}") from error

    def _begin(self) -> int | None:
        """Clear the file before the first record; where the next one starts, if that is known."""
        if not self._is_kept:
            return None
        if not self._is_begun:
            self._file.truncate(0)
            self._is_begun = True
        return self._file.tell()

    def _sync(self) -> None:
        self._num_unsynced = 0
        if self._is_kept:
            os.fsync(self._file.fileno())

    def _take_back(self, start: int | None) -> None:
        if self._path is None or start is None:
            return
        with contextlib.suppress(OSError):  # the rest of the line, which is cut off next
            self._file.close()
        os.truncate(self._path, start)


def _read_done(path: Path) -> Done:
    """Records of an earlier run; a last line that was cut short is removed from the file.

    Lines that are no records are left where they are, and tell nothing.
    """
    done, whole = Done(), 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            whole += len(raw)
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                _note(done, _RECORD.decode(raw))
    os.truncate(path, whole)
    return done


class _Error(msgspec.Struct):
    line: int | None = None


class _Record(msgspec.Struct):
    """What a resumed job reads of a record."""

    custom_id: str | None
    response: dict[str, Any] | None
    error: _Error | None


_RECORD = msgspec.json.Decoder(_Record)


def _note(done: Done, record: _Record) -> None:
    if record.error is not None and record.error.line is not None:
        done.line_numbers.add(record.error.line)
    elif record.custom_id is not None:
        done.custom_ids.add(record.custom_id)
        if record.response is None:
            done.failed_ids.add(record.custom_id)
