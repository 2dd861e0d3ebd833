"""Loading holds little beside the arrays: a small model, in this process."""

from benchmarks.weight_loading import measure_load, write_model
from jaxpaged.convert import convert
from jaxpaged.weights import placing

MIB = 2**20


def test_the_host_never_holds_the_model_beside_its_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "MAX_HOST_BYTES", 4 * MIB)
    model, out = tmp_path / "model", tmp_path / "out"
    assert write_model(model, num_layers=10, embed=512, vocab=4096) > 75 * MIB
    convert(model, out, "auto", 4, {})
    for folder in (model, out):
        assert measure_load(folder, 4)["excess_bytes"] < 32 * MIB
