"""Lines of a benchmark: JSON for machines, a table for people, with what they were measured on."""

import json
import platform
import subprocess
import time
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO


class Report:
    """Collects measurements and writes each as soon as it is there."""

    def __init__(self, out: TextIO, file: Path | None):
        self._out, self._file = out, file
        self._lines: list[dict[str, Any]] = []

    def header(self, command: str, *, opens_device: bool) -> None:
        """Say what is measured on: command, date, versions, and the device if it may be opened."""
        line = {
            "command": command,
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "jax": version("jax"),
            "python": platform.python_version(),
        }
        if opens_device:
            import jax

            device = jax.devices()[0]
            line["device"] = device.device_kind
            line["driver"] = getattr(device.client, "platform_version", "")
        else:
            line["device"] = _gpu_name()
        self._write(line)

    def phases(self, seconds: dict[str, float]) -> None:
        self._write({"phases_s": {name: round(s, 2) for name, s in seconds.items()}})

    def add(self, label: str, line: dict[str, Any]) -> None:
        """Add one measurement."""
        self.take({"label": label} | line)

    def take(self, line: dict[str, Any], row: dict[str, Any] | None = None) -> None:
        """Add a line as it is; in the table stands `row`, or the line of a measurement itself."""
        if row is not None or "label" in line:
            self._lines.append(line if row is None else row)
        self._write(line)

    def show(self, row: dict[str, Any]) -> None:
        """Add to the table alone."""
        self._lines.append(row)

    def kernels(self, times: dict[str, tuple[int, float]], most: int) -> None:
        """List the kernels that took the longest: launches, microseconds in all, name."""
        for name, (count, micros) in list(times.items())[:most]:
            self._out.write(f"  {count:6d} {micros:10.1f} us  {name[:100]}\n")

    def table(self) -> None:
        """Print the measurements as tables, a new one where the columns change."""
        for columns, lines in groupby(self._lines, _columns):
            rows = [columns, *([str(line[column]) for column in columns] for line in lines)]
            widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
            for row in rows:
                cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
                self._out.write("  ".join(cells).rstrip() + "\n")
            self._out.write("\n")

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        self._out.write(text + "\n")
        self._out.flush()
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def _columns(line: dict[str, Any]) -> list[str]:
    return [column for column, value in line.items() if not isinstance(value, list)]


def _gpu_name() -> str:
    """As the driver's own tool tells it, without opening the GPU; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0]
