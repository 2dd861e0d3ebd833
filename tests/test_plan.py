import json
from pathlib import Path

import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.config.pooling import leave_room, share_devices
from jaxpaged.plan import main
from tests.support.models import write_model

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "benchmarks" / "configs"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """`main` sets variables of JAX for its process."""
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, {"JAX_PLATFORMS": "cpu"}.get(name, "false"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")


def test_a_plan_needs_no_weights_and_no_gpu_and_is_what_the_readme_shows(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    readme = Path("README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ .venv/bin/jaxpaged plan ")[2].partition("```")[0]
    command, *lines = shown.splitlines()
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_what_does_not_fit_exits_with_one_and_says_what_helps(capsys):
    flags = ["--gpu", "18", "--max-model-len", "8192"]
    assert main([str(CONFIGS / "llama3-8b"), *flags]) == 1
    assert "does not fit: " in capsys.readouterr().out


def test_pages_in_host_memory_are_told(capsys):
    assert main([str(CONFIGS / "llama3-8b"), "--gpu", "H200", "--swap-space", "4"]) == 0
    assert "host pages         2048 in 4 GiB\n" in capsys.readouterr().out


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


def test_a_model_that_embeds_is_counted_where_it_shares_the_device(capsys):
    command = [str(CONFIGS / "llama3-8b"), "--gpu", "H200", "--json"]
    beside = [*command, "--embedding-model", str(CONFIGS / "qwen3-embedding-0.6b")]
    own_gpu = [*beside, "--embedding-settings", '{"device_ids": [1]}']
    alone, both, apart = (
        [main(flags), json.loads(capsys.readouterr().out)][1]
        for flags in (command, beside, own_gpu)
    )
    weights, pages = 28 * 15_730_944 * 2 + 151_669 * 1024 * 2, 2049 * 28 * 2 * 16 * 8 * 128 * 2
    assert weights + pages < both["embedding_bytes"] < 1.1 * (weights + pages) + 1.2 * 2**30
    assert alone["limit_bytes"] - both["limit_bytes"] == pytest.approx(both["embedding_bytes"], 2)
    assert alone["num_gpu_blocks"] > both["num_gpu_blocks"]
    assert apart["limit_bytes"] == alone["limit_bytes"]
    assert main([*command[:1], "--gpu", "3", *beside[3:]]) == 2
    assert "the embedding model takes 194% of the GPU" in capsys.readouterr().err


def test_replicas_are_told_beside_the_plan_of_one(capsys):
    command = [str(CONFIGS / "llama3-8b"), "--gpu", "H200"]
    assert main(command) == 0
    one = capsys.readouterr().out.splitlines()
    assert main([*command, "-dp", "3"]) == 0
    *three, told, verdict = capsys.readouterr().out.splitlines()
    assert [*three, verdict] == one
    assert "3 like this on 3 devices, each with a whole model; 768 sequences" in told


def test_models_share_a_device_unless_told_apart():
    def config(**settings):
        return config_from_keywords(model="m", **settings)

    assert share_devices(config(), config())
    assert not share_devices(config(), config(device_ids=(1,)))
    assert share_devices(config(tensor_parallel_size=2), config(device_ids=(1,)))
    assert share_devices(config(data_parallel_size=2), config(device_ids=(1,)))
    assert not share_devices(config(device_ids=(2,)), config())
    wanted = config().cache.gpu_memory_utilization
    assert leave_room(config(), 0.25).cache.gpu_memory_utilization == wanted - 0.25


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
        (["--gpu", "H200", "--preemption-mode", "swap"], "raise --swap-space"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(flags, text, capsys):
    assert main([str(CONFIGS / "llama3-8b"), *flags]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
