import pytest

from benchmarks.pack_model import join, split


def test_a_file_is_the_same_after_its_parts_are_joined(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 10)
    names = split(file, tmp_path / "parts", 1000)
    assert names == ["model.gguf.0", "model.gguf.1", "model.gguf.2"]
    join(tmp_path / "parts", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(b"x" * 1000)])
def test_a_missing_or_damaged_part_is_named_and_nothing_is_written(tmp_path, harm):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(2500))
    split(file, tmp_path / "parts", 1000)
    harm(tmp_path / "parts" / "model.gguf.1")
    with pytest.raises(ValueError, match=r"model\.gguf\.1 is (missing|damaged)"):
        join(tmp_path / "parts", tmp_path / "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "parts"]
