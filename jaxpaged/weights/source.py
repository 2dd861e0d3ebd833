"""What the loader needs of a file format, and how a refusal stays one line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxpaged.errors import WeightsError

MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor. `start` and `stop` are bytes from the file's beginning."""

    shape: tuple[int, ...]
    dtype: str  # the format's own name
    start: int
    stop: int


class TensorSource(Protocol):
    """A checkpoint whose header was checked and whose tensors are read when asked for."""

    label: str  # names the checkpoint in errors

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows `start : stop` of the first axis, floating point."""
        ...

    def read_into(self, name: str, start: int, out: NDArray[Any]) -> bool:
        """Fill contiguous `out` with whole rows from `start`, if the file has them in its type."""
        ...


def cast_into(view: NDArray[Any], values: NDArray[Any], label: str, name: str) -> None:
    """Store values in the view's type, or refuse those that it cannot hold."""
    with np.errstate(over="raise"):
        try:
            view[...] = values
        except FloatingPointError as error:
            problem = f"{name} has values over {view.dtype}: take bfloat16 or float32"
            raise WeightsError(clip(f"{label}: {problem}")) from error


class _Renamed:
    """A source whose tensors go by other names. `names` has ours and the file's."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        self.label, self._source, self._names = source.label, source, names
        self.tensors = {ours: source.tensors[name] for ours, name in names.items()}

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self._source.read(self._names[name], start, stop)

    def read_into(self, name: str, start: int, out: NDArray[Any]) -> bool:
        return self._source.read_into(self._names[name], start, out)


def renamed(source: TensorSource, beginnings: Mapping[str, str]) -> TensorSource:
    """`source` with the beginnings of its tensors' names replaced; an empty one matches all."""

    def ours(name: str) -> str:
        found = next((old for old in beginnings if name.startswith(old)), None)
        return name if found is None else beginnings[found] + name.removeprefix(found)

    return _Renamed(source, {ours(name): name for name in source.tensors})


def first_of(problems: Iterable[str], label: str) -> str:
    """Join as many problems as fit into one line and count the rest."""
    problems = list(problems)
    text, shown = f"{label}: ", 0
    for problem in problems:
        rest = len(problems) - shown - 1
        tail = f"; and {rest} more" if rest else ""
        joined = problem if shown == 0 else f"; {problem}"
        if shown and len(text) + len(joined) + len(tail) > MAX_ERROR_CHARS:
            break
        text, shown = text + joined, shown + 1
    rest = len(problems) - shown
    tail = f"; and {rest} more" if rest else ""
    return clip(text, MAX_ERROR_CHARS - len(tail)) + tail


def clip(text: str, most: int = MAX_ERROR_CHARS) -> str:
    """One printable line of at most `most` characters."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= most else line[: most - 3] + "..."


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Put `overrides` over `config`; mappings in both are merged."""
    result = dict(config)
    for name, value in overrides.items():
        old = result.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[name] = merged(old, value) if both else value  # pyright: ignore[reportArgumentType]
    return result
