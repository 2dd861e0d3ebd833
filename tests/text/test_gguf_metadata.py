"""Reading GGUF metadata: right values, and damaged files refused in one line."""

import struct
from pathlib import Path

import pytest

from jaxpaged.errors import WeightsError
from jaxpaged.text.gguf_metadata import read_gguf_metadata


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(fields: bytes, *, count: int, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, 0, count) + fields + b"\0" * 64


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def test_scalars_strings_and_arrays_are_plain_values(tmp_path):
    fields = (
        text("a") + struct.pack("<IB", 7, 1)
        + text("b") + struct.pack("<If", 6, 0.5)
        + text("c") + struct.pack("<I", 8) + text("naïve")
        + text("d") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("")
        + text("e") + struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 7)
        + text("f") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ2H", 2, 2, 1, 2)
    )  # fmt: skip
    want = {"a": True, "b": 0.5, "c": "naïve", "d": ["x", ""], "e": [-1, 0, 7], "f": [[1, 2]]}
    assert read_gguf_metadata(write(tmp_path, gguf(fields, count=6))) == want


HUGE = 2**62


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", "too short"),
        (gguf(b"", count=0, magic=b"GGUX"), "begins with"),
        (gguf(b"", count=0, version=1), "version 1"),
        (gguf(b"", count=HUGE), "fields"),
        (gguf(struct.pack("<Q", HUGE), count=1), "cut off or damaged"),
        (gguf(text("a") + struct.pack("<IIQ", 9, 8, HUGE), count=1), "entries"),
        (gguf(text("a") + struct.pack("<IIQ", 9, 0, HUGE), count=1), "cut off or damaged"),
        (gguf(text("a") + struct.pack("<I", 99), count=1), "unknown value type 99"),
        (gguf(text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, count=1), "deep"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, content, names):
    with pytest.raises(WeightsError, match=names) as caught:
        read_gguf_metadata(write(tmp_path, content))
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_good_file_is_refused_or_read(tmp_path):
    fields = text("a") + struct.pack("<I", 8) + text("value")
    whole = gguf(fields, count=1)[:-64]
    for length in range(len(whole)):
        with pytest.raises(WeightsError):
            read_gguf_metadata(write(tmp_path, whole[:length]))
