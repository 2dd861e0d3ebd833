"""The server as processes: what signals and faults of the engine do to clients and exit codes."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
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
            start_new_session=True,
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

    def streams(
        self, number: int, body=BODY, path: str = "/v1/completions"
    ) -> tuple[list[threading.Thread], list]:
        """Ask in threads; answers come into the list as (status, data)."""
        answers: list = []

        def ask() -> None:
            answers.append(self.send("POST", path, body))

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_its_processes_lets_eight_streams_finish_and_ends_with_0(serve, number):
    server = serve(step_s=0.005)
    threads, answers = server.streams(8)
    time.sleep(0.5)
    os.killpg(server.process.pid, number)  # as a terminal does
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


@pytest.mark.slow
def test_health_is_quick_while_a_huge_prompt_is_encoded_and_a_heavy_schema_compiled(serve):
    server = serve()
    huge = {"prompt": "naïve text " * 480_000, "truncate_prompt_tokens": 100, "max_tokens": 2}
    heavy = {"type": "array", "items": {"type": "string", "maxLength": 20_000}, "minItems": 3}
    held = {"prompt": "x", "structured_outputs": {"json": heavy}}
    (one, encoded), (other, compiled) = server.streams(1, huge), server.streams(2, held)
    waits = []
    while any(thread.is_alive() for thread in (*one, *other)):
        begun = time.monotonic()
        assert server.send("GET", "/health")[0] == 200
        waits.append(time.monotonic() - begun)
        time.sleep(0.005)
    waits.sort()
    assert waits[int(len(waits) * 0.99)] < 0.1, waits[-20:]
    assert [status for status, _ in encoded] == [200]
    assert {status for status, _ in compiled} <= {200, 400}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_hundred_clients_that_leave_at_any_stage_leave_nothing_behind(serve):
    server, rng = serve(step_s=0.001), random.Random(0)
    for number in range(500):
        data = json.dumps(BODY | {"stream": bool(number % 2), "max_tokens": 1900}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        whole = head.encode() + data
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            if rng.random() < 0.5:  # a reset instead of an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(whole[: rng.choice([0, 9, len(head), len(whole) - 5, *[len(whole)] * 6])])
            time.sleep(rng.choice([0, 0, 0.001, 0.01, 0.03]))
            if number % 2 and rng.random() < 0.2:
                sock.settimeout(0.05)
                with contextlib.suppress(OSError):
                    sock.recv(200)
    begun = time.monotonic()
    running = b'vllm:num_requests_running{engine="0",model_name='
    while not re.search(re.escape(running) + rb'"\S+ 0.0', server.send("GET", "/metrics")[1]):
        assert time.monotonic() - begun < 1
        time.sleep(0.01)
    assert json.loads(server.send("GET", "/load")[1]) == {"server_load": 0}
    plain = {"prompt": "ABC", "max_tokens": 3, "temperature": 0}
    assert b'"DEF"' in server.send("POST", "/v1/completions", plain)[1]
