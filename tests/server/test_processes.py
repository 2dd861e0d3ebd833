"""The server as processes: what signals and faults of the engine do to clients and exit codes."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.models import write_model

WORKER = "tests.support.fake_worker"
THIN = "tests.support.thin_worker"
SERVE = "import sys; from server.command import main; sys.exit(main(worker={!r}))"
BODY = {"prompt": "ABC", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": 300}


class Server:
    """A server over the successor model; keywords are the faults of its engine."""

    def __init__(self, folder: Path, *flags: str, worker: str = WORKER, **faults):
        model = str(write_model("S", folder))
        settings = [f"--hf-overrides={json.dumps(faults)}", "--host=127.0.0.1", "--port=0"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE.format(worker), model, *settings, *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if " serving " in line:
                self.port = int(line.rpartition(":")[2])
                break
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def send(self, method: str, path: str, body=None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        return reply.status, data

    def streams(self, number: int, body=BODY) -> tuple[list[threading.Thread], list]:
        """Ask in threads; answers come into the list as (status, data)."""
        answers: list = []

        def ask() -> None:
            answers.append(self.send("POST", "/v1/completions", body))

        threads = [threading.Thread(target=ask) for _ in range(number)]
        for thread in threads:
            thread.start()
        return threads, answers

    def health_within(self, status: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.send("GET", "/health")[0] == status:
                    return True
            except OSError:
                pass
            time.sleep(0.02)
        return False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)  # both processes have let go of stderr then
        assert not self._reader.is_alive()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def serve(tmp_path: Path):
    made: list[Server] = []

    def start(*flags: str, **options) -> Server:
        made.append(Server(tmp_path, *flags, **options))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_a_signal_lets_eight_streams_finish_and_ends_with_0(serve):
    server = serve(step_s=0.005)
    threads, answers = server.streams(8)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    assert len(answers) == 8
    for status, data in answers:
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in data.split(b"\n\n")[:-2]]
        assert (status, len(texts)) == (200, 300)
        assert data.endswith(b"[DONE]\n\n")
    assert server.process.wait(10) == 0


def test_a_step_that_raises_is_told_to_all_and_ends_with_1(serve):
    server = serve(fault="raise", step=100, step_s=0.01)
    threads, answers = server.streams(4)
    for thread in threads:
        thread.join(30)
    begun = time.monotonic()
    assert len(answers) == 4
    assert all(b'"server_error"' in data for _, data in answers)
    assert server.process.wait(10) == 1
    assert time.monotonic() - begun < 5
    assert "broken on purpose" in "".join(server.said)


def test_a_replica_that_dies_degrades_health_and_the_other_finishes_its_streams(serve):
    server = serve("-dp=2", worker=THIN, fault="exit", step=50, rank=1, step_s=0.01)
    assert server.send("GET", "/health") == (200, b"")
    threads, answers = server.streams(4)
    while not (body := server.send("GET", "/health")[1]):
        time.sleep(0.02)
    ready, gone = json.loads(body)["replicas"]
    assert json.loads(body)["status"] == "degraded"
    assert (ready["state"], gone["state"], gone["engine"]) == ("ready", "restarting", 1)
    for thread in threads:
        thread.join(30)
    assert sorted(b"server_error" in data for _, data in answers) == [False, False, True, True]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


@pytest.mark.slow
def test_a_step_that_hangs_fails_health_then_ends_with_1(serve):
    server = serve("--stall-timeout=1", "--watchdog-timeout=3", fault="hang", step=50, step_s=0.01)
    threads, answers = server.streams(4)
    assert server.health_within(503, 6)
    begun = time.monotonic()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 4
    assert all(b'"server_error"' in data for _, data in answers)
    assert server.process.wait(10) == 1
    assert time.monotonic() - begun < 3 + 5
    server._reader.join(5)
    assert "fake_worker.py" in "".join(server.said)  # the stack of the step that hangs


@pytest.mark.slow
def test_an_idle_server_takes_no_time(serve):
    server = serve()
    pids = [server.process.pid]
    children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
    pids += map(int, children)
    assert len(pids) == 2

    def used() -> float:
        fields = [Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in pids]
        ticks = sum(int(f[11]) + int(f[12]) for f in fields)
        return ticks / os.sysconf("SC_CLK_TCK")

    time.sleep(1)
    before, begun = used(), time.monotonic()
    time.sleep(3)
    assert (used() - before) / (time.monotonic() - begun) < 0.02
