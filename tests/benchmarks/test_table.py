import json

import pytest

from benchmarks.table import BEGIN, END, README, put, tables


def test_readme_shows_what_the_results_say():
    readme = README.read_text(encoding="utf-8")
    assert readme == put(readme, tables()), "run python -m benchmarks.table"


def write(folder, name, *lines):
    header = {"command": "jaxpaged bench", "device": "NVIDIA H200", "jax": "0.11.2"}
    text = "\n".join(json.dumps(header | line if "date" in line else line) for line in lines)
    (folder / name).write_text(text + "\n")


def decode(rate):
    line = {"label": "llama3-8b", "workload": "decode", "output_tok_per_s": rate}
    return line | {"of_roofline": 0.5}


def test_the_latest_line_counts_and_lines_after_a_note_do_not(tmp_path):
    write(tmp_path, "a.jsonl", {"date": "2026-02-02"}, decode(38896), {"note": "odd"}, decode(1))
    write(tmp_path, "b.jsonl", {"date": "2026-01-01"}, decode(2))
    text = tables(tmp_path)
    assert "| llama3-8b | decode, tok/s | 38,896 | 19,448 | 2.00 | 25,000 | 50 % |" in text
    assert text.count("decode") == 1
    assert "2026-02-02" in text


def test_every_kind_of_line_has_its_table(tmp_path):
    write(
        tmp_path,
        "all.jsonl",
        {"date": "2026-01-01"},
        {"label": "llama3-8b", "workload": "latency", "ms_per_token_after_first": 2.4332},
        {"label": "llama3-8b", "cache": "cold", "seconds": 54.2},
        {
            "label": "llama3-8b",
            "rows": 1,
            "context": 1024,
            "sampler": "greedy",
            "ms": 4.1,
            "idle": 0.031,
        },
        {"label": "p8192", "op": "attention-mixed", "us": 900.0, "measured": 611.4},
        {"label": "sampler", "op": "sample mixed", "logits": "flat", "ms": 0.51},
        {"label": "x mixed", "load": "mixed", "rate": None, "output_tok_per_s": 9000.0}
        | {"ttft_ms": {"p50": 100.0, "p99": 2000.0}, "itl_ms": {"p50": 9.5, "p99": 20.0}},
    )
    text = tables(tmp_path)
    for row in (
        "| llama3-8b | latency, ms a token | 2.43 | 4.87 | 2.00 | 3.9 |  |",
        "| llama3-8b, cold cache | 54.2 | 109 | 60 | 30 |",
        "| mixed | jaxpaged | 9,000 | 100 | 2,000 | 9.5 | 20 |",
        "| mixed | vllm rust | 10,625 | 117 | 2,848 | 10.3 | 166 |",
        "| 1 x 1024 | 4.1 | 4.2 | 3.8 |  | 3 % |",
        "| p8192 | TFLOP/s | 611 | 640 | 550 | 680 |  |",
        "flat logits | ms | 0.51 |  | 0.6 | 0.4 |  |",
    ):
        assert row in text, row


def test_measurements_without_a_gpu_are_left_out(tmp_path):
    write(tmp_path, "cpu.jsonl", {"date": "2026-01-01", "device": "cpu"}, decode(5))
    assert "decode" not in tables(tmp_path)


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="begin"):
        put("# title\n", "text")
    assert put(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
