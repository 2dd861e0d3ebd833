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
    line_numbers: set[int] = field(default_factory=set[int])  # of lines that were no requests

    def holds(self, line: Line | BadLine) -> bool:
        """Whether a line has its record."""
        if isinstance(line, BadLine):
            return line.number in self.line_numbers
        return line.custom_id in self.custom_ids


class OutputFile:
    """Appends records. `path` None writes to `stream`, which cannot be resumed."""

    def __init__(self, path: Path | None, stream: BinaryIO, *, resume: bool):
        self._path, self._num_unsynced = path, 0
        self.done = Done()
        if path is None:
            self._file = stream
            return
        try:
            if resume and path.exists():
                self.done = _read_done(path)
            self._file = path.open("ab" if resume else "wb")
        except OSError as error:
            raise OutputFailed(f"{path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the system.

        Raises:
            OutputFailed: the disk is full or gone; a half line is taken back.
        """
        line = msgspec.json.encode(record) + b"\n"
        start = self._file.tell() if self._path is not None else 0
        try:
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
                self._sync()
                self._file.close()
            except OSError as error:
                raise OutputFailed(f"{self._path}: {error.strerror}") from error

    def _sync(self) -> None:
        self._num_unsynced = 0
        if self._path is not None:
            os.fsync(self._file.fileno())

    def _take_back(self, start: int) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # the rest of the line, which is cut off next
            self._file.close()
        os.truncate(self._path, start)


def _read_done(path: Path) -> Done:
    """Records of an earlier run; a last line that was cut short is removed from the file."""
    done, whole = Done(), 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            whole += len(raw)
            try:
                record = msgspec.json.decode(raw)
            except msgspec.DecodeError:
                continue
            number = (record.get("error") or {}).get("line")
            if number is not None:
                done.line_numbers.add(number)
            elif isinstance(record.get("custom_id"), str):
                done.custom_ids.add(record["custom_id"])
    os.truncate(path, whole)
    return done
