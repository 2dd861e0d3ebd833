"""One start, two models: a process that generates, one that embeds, and the front of both."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.server.test_processes import BODY, Server
from tests.support.embedding import write_tiny

EMBED = "/v1/embeddings"
MANY = {"input": ["a b c d e f g h"] * 2000, "encoding_format": "base64"}


@pytest.fixture
def both(tmp_path: Path):
    bert = write_tiny("bert", tmp_path / "bert", pooling="mean_tokens")
    names = {"served_model_name": "tiny-bert", "max_model_len": 32, "max_num_batched_tokens": 32}
    settings = json.dumps(names | {"compile_cache_dir": ""})
    flags = ("--embedding-model", str(bert), "--embedding-settings", settings)
    server = Server(tmp_path, *flags, step_s=0.005)
    yield server
    server.close()


def embed(server: Server, body: dict) -> tuple[int, dict]:
    status, data = server.send("POST", EMBED, body)
    return status, json.loads(data)


def has_ended(data: bytes) -> bool:
    return data.endswith(b"[DONE]\n\n") and b'"finish_reason":"length"' in data


def test_both_answer_at_the_same_time_and_a_signal_lets_both_finish(both):
    listed = json.loads(both.send("GET", "/v1/models")[1])["data"]
    assert [model["max_model_len"] for model in listed] == [2048, 32]
    assert listed[1]["id"] == "tiny-bert"
    assert all(Path(model["root"]).is_dir() for model in listed)
    [alone] = embed(both, {"input": "a b c"})[1]["data"]
    threads, answers = both.streams(4)
    num_embedded = 0
    while any(thread.is_alive() for thread in threads):
        status, body = embed(both, {"input": ["a b c", "x y"], "model": "tiny-bert"})
        assert (status, body["data"][0]["embedding"]) == (
            200,
            pytest.approx(alone["embedding"], abs=1e-6),
        )
        assert both.send("GET", "/health") == (200, b"")
        num_embedded += 1
    assert num_embedded > 10
    assert [has_ended(data) for _, data in answers] == [True] * 4

    threads, answers = both.streams(2)
    embedding, vectors = both.streams(1, MANY, EMBED)
    time.sleep(0.2)
    both.process.send_signal(signal.SIGTERM)
    for thread in (*threads, *embedding):
        thread.join(30)
    assert [has_ended(data) for _, data in answers] == [True] * 2
    [(status, data)] = vectors
    assert (status, len(json.loads(data)["data"])) == (200, 2000)
    assert both.process.wait(20) == 0


@pytest.mark.slow
def test_an_engine_that_dies_takes_the_server_with_it_and_all_who_wait_are_told(both):
    threads, answers = both.streams(2, BODY | {"max_tokens": 1900})
    embedding, vectors = both.streams(1, MANY, EMBED)
    time.sleep(0.2)
    os.kill(worker_of(both, "jaxpaged.engine.pooling.worker"), signal.SIGKILL)
    for thread in (*threads, *embedding):
        thread.join(30)
    [(status, data)] = vectors
    assert status == 500
    assert b"the engine's process has ended" in data
    assert all(b'"server_error"' in data for _, data in answers)
    assert both.process.wait(20) == 1  # so that a supervisor starts both again


def worker_of(server: Server, module: str) -> int:
    """The process of the server that runs a module."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [found] = [c for c in children if module in Path(f"/proc/{c}/cmdline").read_text()]
    return int(found)
