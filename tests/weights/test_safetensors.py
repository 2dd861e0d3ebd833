import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.errors import WeightsError
from jaxpaged.weights.safetensors import SafetensorsSource, read_header
from tests.weights.refusals import refusal

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]}
DATA = bytes(24)


def file_of(header, data=DATA, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def with_a(**changes):
    return file_of({"a": {**A, **changes}, "b": B})


DAMAGED = {
    "empty": b"",
    "half a length": b"\x08\0\0",
    "length 0": file_of(b"", length=0),
    "length past the end": file_of({"a": A, "b": B}, length=10**6),
    "length 2**63": file_of({"a": A, "b": B}, length=2**63),
    "length 2**64 - 1": file_of({"a": A, "b": B}, length=2**64 - 1),
    "no JSON": file_of(b"{not json"),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "a list": file_of(b"[1, 2]"),
    "deep nesting": file_of(b"[" * 100_000 + b"]" * 100_000),
    "a huge number": file_of(b'{"a": ' + b"9" * 10_000 + b"}"),
    "entry is a number": file_of({"a": 3}),
    "no dtype": file_of({"a": {"shape": [2, 2], "data_offsets": [0, 16]}}),
    "unknown dtype": with_a(dtype="F33"),
    "dtype is a list": with_a(dtype=["F32"]),
    "dtype of another size": with_a(dtype="F64"),
    "no shape": with_a(shape=None),
    "negative size": with_a(shape=[-2, -2]),
    "fractional size": with_a(shape=[2.0, 2]),
    "true as a size": with_a(shape=[True, 4]),
    "huge sizes": with_a(shape=[2**62, 2**62]),
    "too small a shape": with_a(shape=[2, 1]),
    "one offset": with_a(data_offsets=[0]),
    "offsets backwards": with_a(data_offsets=[16, 0]),
    "negative offset": with_a(data_offsets=[-16, 0]),
    "offsets past the end": with_a(shape=[2**40], data_offsets=[0, 2**42]),
    "overlap": with_a(shape=[2, 3], data_offsets=[0, 24]),
    "hole": file_of({"a": A, "b": {**B, "data_offsets": [20, 28]}}, bytes(28)),
    "data cut off": file_of({"a": A, "b": B}, DATA[:-1]),
    "data too long": file_of({"a": A, "b": B}, DATA + b"\0"),
    "the same name twice": file_of(
        b'{"a": %s, "a": %s}' % ((json.dumps(A).encode(),) * 2), DATA[:16]
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[name])
    assert "model.safetensors" in refusal(WeightsError, lambda: read_header(path))


def test_the_undamaged_file_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"__metadata__": {"format": "pt"}, "a": A, "b": B}))
    assert {name: info.shape for name, info in read_header(path).items()} == {
        "a": (2, 2),
        "b": (4,),
    }


def test_every_type_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        str(dtype): rng.standard_normal((5, 3)).astype(dtype)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for name, want in tensors.items():
        assert source.read(name, 1, 4).dtype == want.dtype
        np.testing.assert_array_equal(source.read(name, 1, 4), want[1:4])


def test_a_type_that_is_no_weight_is_refused_when_read(tmp_path):
    save_file({"ids": np.arange(4)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert "ids is I64" in refusal(WeightsError, lambda: source.read("ids", 0, 4))


def write_shards(folder, weight_map=None):
    save_file({"a": np.float32([1])}, folder / "one.safetensors")
    save_file({"b": np.float32([2])}, folder / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_through_their_index(tmp_path):
    write_shards(tmp_path)
    source = SafetensorsSource(tmp_path)
    assert [float(source.read(name, 0, 1)[0]) for name in "ab"] == [1, 2]


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "a in two.safetensors"),
        ({"a": "../one.safetensors"}, "../one.safetensors"),
        ({"a": "/etc/passwd"}, "/etc/passwd"),
        ({"a": "one.bin"}, "one.bin"),
        ({"a": 1}, "1"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_does_not_hold_is_one_line(weight_map, named, tmp_path):
    write_shards(tmp_path)
    text = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert named in refusal(WeightsError, lambda: SafetensorsSource(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path)
    save_file({"a": np.float32([1]), "b": np.float32([2])}, tmp_path / "two.safetensors")
    assert "a stands in another file" in refusal(WeightsError, lambda: SafetensorsSource(tmp_path))


def test_a_file_cut_off_after_its_header_was_read_is_one_line(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((4, 8), np.float32)}, path)
    source = SafetensorsSource(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut off" in refusal(WeightsError, lambda: source.read("a", 3, 4))
