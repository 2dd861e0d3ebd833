"""What a batch reads and writes: its lines, its answers and its errors. All of it blocks."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxpaged.errors import RequestError
from jaxpaged.generate.job import Record, error_record
from jaxpaged.generate.lines import BadLine, Line, read_lines
from jaxpaged.generate.output import OutputFile

MAX_LINES = 50_000
MAX_ERRORS = 20  # told of one file
MAX_LINE_BYTES = 8 * 2**20


def lines_of(path: Path, endpoint: str) -> Iterator[Line | BadLine]:
    """The lines of an input; closes the file when it has been read or is given up.

    Raises:
        RequestError: a line is too long to be looked at.
    """
    with path.open("rb") as file:
        yield from read_lines(_raw_lines(file), (endpoint,))


def _raw_lines(file: BinaryIO) -> Iterator[bytes]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise RequestError(f"line {number} has over {MAX_LINE_BYTES} bytes: send less in it")
        yield raw


def check_input(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """How many lines an input has, and what is wrong with it."""
    number, errors = 0, list[dict[str, Any]]()
    try:
        for number, line in enumerate(lines_of(path, endpoint), 1):
            if isinstance(line, BadLine):
                errors.append(_error("invalid_line", line.reason, line.number))
            if number > MAX_LINES:
                errors.append(_error("too_many_lines", f"over {MAX_LINES} lines: make it two"))
            if len(errors) >= MAX_ERRORS or number > MAX_LINES:
                break
    except RequestError as error:
        errors.append(_error("invalid_line", str(error)))
    if not number and not errors:
        errors.append(_error("empty_file", "the file has no line"))
    return number, errors


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}


class SplitOutput:
    """Answers in one file, errors in another; what an earlier run has written counts as done.

    It must be opened before anything else, and closed whatever became of that.
    """

    def __init__(self, answers: Path, errors: Path):
        self.paths = answers, errors
        self.num_completed = self.num_failed = 0
        self._files: list[OutputFile] = []
        self._done: set[str] = set()

    def open(self) -> None:
        for path in self.paths:
            self._files.append(OutputFile(path, io.BytesIO(), resume=True))
        answered, failed = (file.done.custom_ids for file in self._files)
        self.num_completed, self.num_failed = len(answered), len(failed)
        self._done = answered | failed

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed

    @property
    def counts(self) -> dict[str, int]:
        return {"num_completed": self.num_completed, "num_failed": self.num_failed}

    def holds(self, line: Line | BadLine) -> bool:
        return line.custom_id in self._done

    def write(self, records: Iterable[Record]) -> None:
        answers, errors = self._files
        for record in records:
            if record["response"] is None:
                errors.write(record)
                self.num_failed += 1
            else:
                answers.write(record)
                self.num_completed += 1
            self._done.add(record["custom_id"])

    def expire(self, lines: Iterator[Line | BadLine]) -> None:
        """An error for every line that has not been answered in time."""
        told = "its batch ended before it was answered"
        self.write(
            error_record(line.custom_id, "batch_expired", told)
            for line in lines
            if not self.holds(line)
        )

    def close(self) -> None:
        """Have all of it on the disk; what is empty goes. Does nothing the second time."""
        files, self._files = self._files, []
        for file, path in zip(files, self.paths, strict=False):  # one, where the other did not open
            file.close()
            if path.exists() and not path.stat().st_size:
                path.unlink()
