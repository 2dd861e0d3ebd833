"""A batch outlives its server: killed in the middle, it goes on and answers each line once."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import openai
import pytest

from server import command
from server.app import create_app
from server.batching.store import BatchStore
from server.serving import serve
from server.settings import ServerSettings
from server.state import ServerLimits
from tests.server.batching.conftest import jsonl, line
from tests.server.conftest import COMPLETIONS
from tests.support.fake_engine import fake_llm

NUM_LINES = 500
FORK = multiprocessing.get_context("fork")  # what the server needs is imported already
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def live(folder: Path, listening: socket.socket, step_s: float) -> None:
    """A server's whole life; its steps take `step_s` each."""

    async def run() -> int:
        llm, engine = fake_llm(folder / "model")
        engine.before_step = lambda step: time.sleep(step_s)
        limits = ServerLimits(shutdown_timeout_s=5)
        settings = ServerSettings("127.0.0.1", 0, None, (), None, limits, "info")
        store = BatchStore(folder / "batches", 10**7, 10**8)
        return await serve(create_app(llm, (), limits, store), listening, settings)

    os._exit(asyncio.run(run()))


@pytest.fixture
def serve_again(tmp_path):
    """Start a server over the same folder and address, one after the other."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    made: list = []

    def serve_one(step_s: float = 0.0):
        made.append(FORK.Process(target=live, args=(tmp_path, listening, step_s), daemon=True))
        made[-1].start()
        return made[-1], openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    yield serve_one
    for process in made:
        process.kill()
        process.join(10)
        process.close()
    listening.close()


def until(client: openai.OpenAI, batch_id: str, is_reached, within_s: float = 60):
    end = time.monotonic() + within_s
    while not is_reached(found := client.batches.retrieve(batch_id)):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


def test_killed_in_the_middle_each_line_is_answered_once(serve_again, tmp_path):
    server, client = serve_again(step_s=0.05)
    lines = [line(f"id-{i}", prompt="ABC"[i % 3], max_tokens=1 + i % 5) for i in range(NUM_LINES)]
    lines[7]["body"]["max_tokens"] = 10**6  # can never be answered
    with client:
        given = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
        batch = client.batches.create(
            input_file_id=given.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        found = until(client, batch.id, lambda b: b.request_counts.completed > 100)
    assert found.status == "in_progress"
    server.kill()
    server.join(10)
    assert server.exitcode == -signal.SIGKILL
    outputs = [p for p in (tmp_path / "batches" / "files").iterdir() if p.name != given.id]
    (cut,) = [path for path in outputs if path.stat().st_size > 1000]
    os.truncate(cut, cut.stat().st_size - 10)  # as if the last line had been cut off, too
    before = len(cut.read_bytes().splitlines())
    assert 100 < before < NUM_LINES
    server, client = serve_again()
    with client:
        found = until(client, batch.id, lambda b: b.status == "completed")
        answers = client.files.content(found.output_file_id).text.splitlines()
        errors = client.files.content(found.error_file_id).text.splitlines()
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (NUM_LINES, NUM_LINES - 1, 1)
    records = [json.loads(row) for row in answers + errors]
    assert Counter(r["custom_id"] for r in records) == Counter(f"id-{i}" for i in range(NUM_LINES))
    for record in records[:-1]:
        number = int(record["custom_id"].removeprefix("id-"))
        (choice,) = record["response"]["body"]["choices"]
        start = "ABC"[number % 3]
        want = "".join(chr(ord(start) + 1 + k) for k in range(1 + number % 5))
        assert choice["text"] == want
    assert records[-1]["custom_id"] == "id-7"


def test_a_drained_server_leaves_its_batch_to_the_next(serve_again):
    server, client = serve_again(step_s=0.02)
    slow = [line(f"{i}", max_tokens=60, ignore_eos=True) for i in range(4)]
    with client:
        given = client.files.create(file=("in.jsonl", jsonl(*slow)), purpose="batch")
        batch = client.batches.create(
            input_file_id=given.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        until(client, batch.id, lambda b: b.status == "in_progress")
    server.terminate()
    server.join(10)
    assert server.exitcode == 0
    server, client = serve_again()
    with client:
        found = until(client, batch.id, lambda b: b.status == "completed")
    assert found.request_counts.completed == 4


def test_a_folder_in_use_is_an_exit_2_before_a_model_is_looked_for(tmp_path, capsys):
    store = BatchStore(tmp_path, 1, 1)
    assert command.main(["no-model", f"--batch-dir={tmp_path}", "--port=0"]) == 2
    assert "in use by another server" in capsys.readouterr().err
    store.close()
