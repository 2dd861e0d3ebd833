"""The file that makes a folder a finished checkpoint of ours: what it holds, with digests.

It is written last, so a folder without it is no checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from jaxpaged.errors import WeightsError
from jaxpaged.weights.source import clip, first_of

MANIFEST = "jaxpaged.json"
WEIGHTS = "weights"  # the folder with Orbax's files
FORMAT, VERSION = "jaxpaged-checkpoint", 1
SMALL_BYTES = 2**20  # checked when the folder is opened; larger files while they are read
MADE_WITH = ("jaxpaged", "jax", "flax", "orbax-checkpoint", "tensorstore")
AGAIN = "convert the model again"


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class WeightRecord:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Names of files are relative to the folder, paths of weights have dots."""

    format: str
    version: int
    made_with: dict[str, str]
    source: str  # name of the model that was converted
    weights: dict[str, WeightRecord]
    files: dict[str, FileRecord]


def write_manifest(folder: Path, source: str, weights: Mapping[str, WeightRecord]) -> None:
    """Take the digests of all files in `folder`, when they are on the disk for good."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as threads:
        records = threads.map(_record, found)
        files = {
            path.relative_to(folder).as_posix(): r for path, r in zip(found, records, strict=True)
        }
    made_with = {name: version(name) for name in MADE_WITH}
    manifest = Manifest(FORMAT, VERSION, made_with, source, dict(weights), files)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, and check that every file is there, of its length, the small ones whole.

    Raises:
        WeightsError: one is not, or the manifest is damaged or of another version.
    """
    label = f"{MANIFEST} of {folder.name}"
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise WeightsError(clip(f"{label} cannot be read: {error.strerror}")) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(clip(f"{label} is damaged: no valid JSON ({error})")) from error
    kind = (content.get("format"), content.get("version")) if isinstance(content, dict) else ()
    if kind != (FORMAT, VERSION):
        said = "says " + " ".join(str(word) for word in kind) if kind else "is no mapping"
        raise WeightsError(clip(f"{label} {said}, read is {FORMAT} {VERSION}: {AGAIN}"))
    try:
        manifest = msgspec.convert(content, Manifest)
    except msgspec.ValidationError as error:
        raise WeightsError(clip(f"{label} is damaged: {error}")) from error
    problems = [
        text for name, record in manifest.files.items() if (text := _misfit(folder, name, record))
    ]
    if problems:
        raise WeightsError(first_of(problems, f"{folder.name}, {AGAIN}"))
    small = {name: r for name, r in manifest.files.items() if r.bytes <= SMALL_BYTES}
    _check_digests(folder, small)
    return manifest


@contextmanager
def digests_checked(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Check the large files beside what is done meanwhile; a wrong one is the error that counts."""
    large = {name: r for name, r in manifest.files.items() if r.bytes > SMALL_BYTES}
    with ThreadPoolExecutor(1) as thread:
        checked = thread.submit(_check_digests, folder, large)
        try:
            yield
        finally:
            checked.result()


def _check_digests(folder: Path, files: Mapping[str, FileRecord]) -> None:
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda name: _digest(folder / name), files)
        wrong = [
            n for (n, r), digest in zip(files.items(), found, strict=True) if digest != r.sha256
        ]
    if wrong:
        problems = [f"{name} has another SHA-256 than when it was written" for name in wrong]
        raise WeightsError(first_of(problems, f"{folder.name}, {AGAIN}"))


def _misfit(folder: Path, name: str, record: FileRecord) -> str:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{name} is outside of the folder"
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    return "" if size == record.bytes else f"{name} has {size} bytes and had {record.bytes}"


def _record(path: Path) -> FileRecord:
    digest = _digest(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(path.stat().st_size, digest)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(clip(f"{path.name} cannot be read: {error.strerror}")) from error
