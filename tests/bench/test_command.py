import json

import pytest

from jaxpaged.bench.command import main
from jaxpaged.bench.targets import workload_target

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SMALL = (
    "--load-format dummy --skip-tokenizer-init --cpu-kvcache-space 0.01 --max-model-len 128 "
    "--batch-buckets 2 --token-buckets 32 --max-num-seqs 2 --compile-cache-dir="
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_latency_counts_every_token_of_a_batch(model, tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    words = f"latency --model {model} {SMALL} --json {file} --batch-size 2"
    lengths = "--input-len 8 --output-len 4 --num-iters 2 --num-iters-warmup 0"
    assert main(f"{words} {lengths}".split()) == 0
    header, phases, line = lines_of(file)
    assert header["command"].startswith("jaxpaged bench latency --model")
    assert header["device"] == "cpu"
    assert "weights" in phases["phases_s"]
    assert 0 < line["p10_ms"] <= line["avg_ms"] <= line["p99_ms"]
    assert capsys.readouterr().out.count("p99_ms") == 2  # as JSON and in the table


def test_the_engines_own_step_is_timed_beside_the_bare_one(model, tmp_path):
    file = tmp_path / "lines.jsonl"
    words = f"step --model {model} {SMALL} --cases 2x60 --steps 2"
    assert main(f"{words} --idle-steps 2 --json {file}".split()) == 0
    line = lines_of(file)[-1]
    assert line["ms"] > 0
    assert line["engine_step_ms"] > 0


@pytest.mark.slow
def test_peer_runs_each_model_in_a_process_and_goes_on_after_a_failure(model, tmp_path, capsys):
    bad = model.parent / "bad"
    bad.mkdir()
    (bad / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 0}))
    file = tmp_path / "lines.jsonl"
    words = f"peer --models bad,tiny --configs {model.parent} --workloads latency --json {file}"
    engine = "--cpu-kvcache-space 0.01 --max-num-seqs 1 --compile-cache-dir="
    assert main([*words.split(), "--seconds", "0", "--engine-args", engine]) == 1
    assert "vocab_size" in capsys.readouterr().err
    measured = [line for line in lines_of(file) if "workload" in line]
    assert [(line["label"], line["output_tokens"]) for line in measured] == [("tiny", 256)]
    assert len(measured[0]["all_s"]) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("peer --models llama9 --configs benchmarks/configs", "llama9"),
        ("throughput --model benchmarks/configs/llama3-8b --workloads decoed", "decoed"),
        ("throughput --model benchmarks/configs/llama3-8b --traced-steps 9", "FIRST:END"),
        ("step --model benchmarks/configs/none --load-format dummy", "none"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_code_2(words, named, capsys):
    assert main(words.split()) == 2
    errors = capsys.readouterr().err
    assert named in errors
    assert errors.count("\n") == 1


def test_the_floor_is_the_peers_figure_with_a_tenth_on_top():
    decode = workload_target("llama3-8b", "decode")
    latency = workload_target("llama3-8b", "latency")
    assert decode.floor == pytest.approx(19448 * 1.1)
    assert latency.floor == pytest.approx(4.8664 / 1.1, abs=0.01)
    assert workload_target("mine", "decode") is None


@pytest.mark.slow
def test_serve_starts_a_server_and_every_answer_has_its_length(model, tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    engine = "--cpu-kvcache-space 0.01 --max-num-seqs 2 --compile-cache-dir="
    words = f"serve --model {model} --loads latency --limit 2 --json {file}"
    assert main([*words.split(), "--server-args", engine]) == 0
    line = lines_of(file)[-1]
    assert (line["ok"], line["output_tokens"], line["text_chunk_share"]) == (2, 512, 1.0)
    table = capsys.readouterr().out
    assert "vllm rust" in table
    assert "goal" in table


@pytest.mark.slow
def test_a_server_that_cannot_start_is_told_in_one_line(model, capsys):
    words = f"serve --model {model} --server-args"
    assert main([*words.split(), "--max-model-len 9000"]) == 1
    assert "max_model_len" in capsys.readouterr().err
