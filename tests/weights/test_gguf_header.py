"""Damaged GGUF headers: each one line, none read past the file or allocated before it is known."""

import resource
import struct

import pytest

from jaxpaged.errors import WeightsError
from jaxpaged.weights.gguf_header import read_header
from tests.weights.refusals import refusal

F32, Q8_0 = 0, 8
UINT32, STRING, ARRAY = 4, 8, 9


def string(text, length=None):
    data = text.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def field(name, kind, value, **sizes):
    return string(name, **sizes) + struct.pack("<I", kind) + value


def tensor(name="t", dims=(4, 2), kind=F32, offset=0, num_dims=None, **sizes):
    count = len(dims) if num_dims is None else num_dims
    shape = struct.pack(f"<I{len(dims)}Q", count, *dims)
    return string(name, **sizes) + shape + struct.pack("<IQ", kind, offset)


TENSOR = tensor()


def gguf_file(
    fields=(), tensors=(TENSOR,), *, magic=b"GGUF", version=3, counts=None, data=bytes(64)
):
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_fields)
    head += b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def alignment(value):
    return [field("general.alignment", UINT32, struct.pack("<I", value))]


def array(kind, count, values=b""):
    return struct.pack("<IQ", kind, count) + values


DEEP = array(ARRAY, 1) * 6 + array(UINT32, 0)
DAMAGED = {
    "empty": b"",
    "magic only": b"GGUF",
    "another magic": gguf_file(magic=b"GGML"),
    "version 1": gguf_file(version=1),
    "version in the other byte order": gguf_file(version=3 << 24),
    "too many tensors": gguf_file(counts=(2**63, 0)),
    "more tensors than bytes": gguf_file(counts=(10**6, 0)),
    "too many fields": gguf_file(counts=(1, 2**64 - 1)),
    "one field too many": gguf_file(counts=(1, 1)),
    "a field's name past the end": gguf_file([field("x", UINT32, bytes(4), length=2**62)]),
    "a field's name too long": gguf_file([field("x" * 600, UINT32, bytes(4))]),
    "unknown value type": gguf_file([field("x", 99, bytes(8))]),
    "string past the end": gguf_file([field("x", STRING, string("abc", length=2**40))]),
    "string of 2**64 - 1": gguf_file([field("x", STRING, string("abc", length=2**64 - 1))]),
    "array past the end": gguf_file([field("x", ARRAY, array(UINT32, 2**61))]),
    "array of unknown type": gguf_file([field("x", ARRAY, array(77, 1, bytes(8)))]),
    "array of strings past the end": gguf_file([field("x", ARRAY, array(STRING, 2**60))]),
    "a string in an array past the end": gguf_file(
        [field("x", ARRAY, array(STRING, 1, string("a", length=2**50)))]
    ),
    "arrays too deep": gguf_file([field("x", ARRAY, DEEP)]),
    "the same field twice": gguf_file([field("x", UINT32, bytes(4))] * 2),
    "alignment 0": gguf_file(alignment(0)),
    "alignment 3": gguf_file(alignment(3)),
    "alignment 2**31": gguf_file(alignment(2**31)),
    "alignment is a string": gguf_file([field("general.alignment", STRING, string("32"))]),
    "a tensor's name past the end": gguf_file(tensors=[tensor(length=2**40)]),
    "no dimensions": gguf_file(tensors=[tensor(dims=())]),
    "nine dimensions": gguf_file(tensors=[tensor(dims=(1,) * 9)]),
    "2**32 - 1 dimensions": gguf_file(tensors=[tensor(num_dims=2**32 - 1)]),
    "a dimension of 0": gguf_file(tensors=[tensor(dims=(4, 0))]),
    "dimensions whose product wraps": gguf_file(tensors=[tensor(dims=(2**32, 2**32))]),
    "dimensions whose bytes wrap": gguf_file(tensors=[tensor(dims=(2**62,))]),
    "unknown tensor type": gguf_file(tensors=[tensor(kind=4242)]),
    "a row that is no whole block": gguf_file(tensors=[tensor(dims=(33, 2), kind=Q8_0)]),
    "an offset off the alignment": gguf_file(tensors=[tensor(offset=4)]),
    "an offset past the end": gguf_file(tensors=[tensor(offset=2**40)]),
    "an offset that wraps": gguf_file(tensors=[tensor(offset=2**64 - 32)]),
    "overlapping tensors": gguf_file(tensors=[tensor("a", (16,)), tensor("b", (8,), offset=32)]),
    "the same tensor twice": gguf_file(tensors=[tensor(), tensor(offset=32)]),
    "data cut off": gguf_file(data=bytes(31)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_one_line(name, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(DAMAGED[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "m.gguf" in refusal(WeightsError, lambda: read_header(path))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 20_000


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_a_file_cut_off_anywhere_is_one_line(cut, tmp_path):
    whole = gguf_file([field("name", STRING, string("value"))])
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:cut])
    refusal(WeightsError, lambda: read_header(path))


def test_the_undamaged_header_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    fields = [
        field("name", STRING, string("value")),
        field("list", ARRAY, array(UINT32, 2, struct.pack("<2I", 5, 6))),
        field("words", ARRAY, array(STRING, 2, string("a") + string("bc"))),
    ]
    tensors = [tensor("a", (4, 2)), tensor("b", (32, 1), Q8_0, offset=32)]
    path.write_bytes(gguf_file(fields, tensors, data=bytes(80)))
    header = read_header(path)
    assert header.metadata == {"name": "value", "list": [5, 6]}
    assert {name: info.shape for name, info in header.tensors.items()} == {
        "a": (2, 4),
        "b": (1, 32),
    }
    assert header.tensors["b"].stop - header.tensors["b"].start == 34


def test_a_missing_file_is_one_line(tmp_path):
    assert "none.gguf" in refusal(WeightsError, lambda: read_header(tmp_path / "none.gguf"))
