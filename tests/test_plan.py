import json
from pathlib import Path

import pytest

from jaxpaged.plan import main
from tests.support.models import write_model

CONFIGS = Path(__file__).parent.parent / "benchmarks" / "configs"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """`main` sets variables of JAX for its process."""
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, {"JAX_PLATFORMS": "cpu"}.get(name, "false"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")


def test_a_plan_needs_no_weights_and_no_gpu(capsys):
    assert main([str(CONFIGS / "llama3-8b"), "--gpu", "H200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama3-8b, bfloat16"
    assert [line[:19].strip() for line in lines[1:]] == [
        "device", "weights", "sequence slots", "workspace", "page pool", "longest context",
        "concurrency", "verdict",
    ]  # fmt: skip
    assert "14.96 GiB" in lines[2]
    assert lines[-1].endswith("fits")


def test_what_does_not_fit_exits_with_one_and_says_what_helps(capsys):
    flags = ["--gpu", "18", "--max-model-len", "8192"]
    assert main([str(CONFIGS / "llama3-8b"), *flags]) == 1
    assert "does not fit: " in capsys.readouterr().out


def test_two_devices_hold_half_each(capsys):
    command = [str(CONFIGS / "llama2-13b"), "--gpu", "H200", "--json", "--max-model-len", "auto"]
    command += ["--hf-overrides", '{"num_hidden_layers": 2}', "--max-num-batched-tokens", "65536"]
    numbers = []
    for devices in ("1", "2"):
        assert main([*command, "-tp", devices]) == 0
        numbers.append(json.loads(capsys.readouterr().out))
    norms = 5 * 5120 * 4  # which both devices hold
    assert numbers[0]["weights_bytes"] == 2 * numbers[1]["weights_bytes"] - norms
    assert numbers[0]["page_bytes"] == 2 * numbers[1]["page_bytes"]
    assert numbers[0]["workspace_bytes"] > numbers[1]["workspace_bytes"]


def test_the_largest_programs_are_compiled_on_the_device_here(tmp_path, capsys):
    model = write_model("R", tmp_path)
    flags = ["--compile", "--json", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"]
    assert main([str(model), *flags, "--num-gpu-blocks-override", "9"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    logits = 4 * 512 * 4
    assert logits < numbers["compiled_workspace_bytes"] < numbers["workspace_bytes"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--gpu", "H200", "--compile"], "leave out --gpu, -tp and -pp"),
        (["--gpu", "H2OO"], "--gpu is 'H2OO', known are"),
        (["--gpu", "H200", "--max-model-len", "9000"], "over the 8192 positions"),
        (["--gpu", "H200", "-tp", "0"], "allowed are 1 to 64"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(flags, text, capsys):
    assert main([str(CONFIGS / "llama3-8b"), *flags]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
