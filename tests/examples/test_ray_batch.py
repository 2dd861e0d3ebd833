"""The Ray example answers a file on one machine, as it would over many."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import write_model

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ray_batch.py"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'"
)
def test_every_line_is_answered_and_a_bad_one_says_why(tmp_path):
    model, prompts, answers = write_model("S", tmp_path), tmp_path / "in.jsonl", tmp_path / "out"
    lines = [{"id": 1, "prompt": "ABC"}, {"id": 2, "prompt": "K" * 3000}, {"id": 3, "prompt": "x"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    flags = ["--gpus", "0", "--max-tokens", "4"]
    command = [sys.executable, str(EXAMPLE), str(model), str(prompts), str(answers), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted(answers.glob("*.json*"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    by_id = {row["id"]: row for row in found}
    assert by_id[1]["answer"] == "DEFG"
    assert by_id[3] == {"id": 3, "prompt": "x", "answer": "yz{|", "num_tokens": 4, "error": ""}
    assert by_id[2]["answer"] == ""
    assert "maximum context length of 2048" in by_id[2]["error"]
