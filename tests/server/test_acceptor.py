"""More connections than there is room or files for: the newest are served, quickly and quietly."""

import asyncio
import errno
import resource
import shutil
import socket
import ssl

import aiohttp
import pytest

from server.acceptor import PER_PASS, TELL_S, Acceptor
from server.certificates import Certificates
from server.listener import Listener, connection_limit
from server.state import ServerLimits
from tests.server.test_certificates import write_pair
from tests.server.test_protocol import until
from tests.server.test_slow_clients import ASK, connect, num_open


class Short(socket.socket):
    """A listening socket of a process that finds no file for a connection `num_short` times."""

    num_short = 0
    num_asked = 0

    def accept(self):
        self.num_asked += 1
        if self.num_short:
            self.num_short -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def listen(server, context: ssl.SSLContext | None = None) -> tuple[Listener, Short]:
    """A second address of the server's application."""
    listening = Short()
    listening.bind(("127.0.0.1", 0))
    return await Listener.start(server.app, listening, context), listening


async def test_where_files_run_out_one_line_tells_it_and_nobody_is_lost(server, caplog):
    listener, listening = await listen(server)
    listening.num_short = 3
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    rests = await connect(server)
    assert (await server.post(ASK)).text == "DEF"
    assert listening.num_asked < 3 + 2 + 5  # it was not asked again and again
    told = [record for record in caplog.records if "no connection can be taken" in record.message]
    assert [record.exc_info for record in told] == [None]
    assert TELL_S > 1
    rests[1].close()
    await listener.close()


async def test_a_burst_of_connections_is_taken_in_parts(server, monkeypatch):
    numbers, accept = [], Acceptor._accept

    def counting(acceptor):
        before = acceptor._listening.num_asked
        accept(acceptor)
        numbers.append(acceptor._listening.num_asked - before)

    monkeypatch.setattr(Acceptor, "_accept", counting)
    listener, listening = await listen(server)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(5 * PER_PASS)]
    await until(lambda: num_open(server) == len(clients))
    assert max(numbers) == PER_PASS
    for client in clients:
        client.close()
    await listener.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with it")
async def test_clients_that_never_agree_on_tls_make_room(start, tmp_path):
    server = await start(limits=ServerLimits(max_connections=20))
    cert, key = write_pair(tmp_path, "localhost")
    context = Certificates(str(cert), str(key), None, ssl.CERT_NONE).context()
    listener, listening = await listen(server, context)
    port = listening.getsockname()[1]
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
    async with aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{port}/health"
        async with session.get(url, ssl=False) as reply:
            assert reply.status == 200
        await until(lambda: sum(reader.at_eof() for reader, _ in silent) == 41)
        ended = [reader.at_eof() for reader, _ in silent]
        assert ended == sorted(ended, reverse=True)  # the oldest went first
    for _, writer in silent:
        writer.close()
    await listener.close()


@pytest.mark.parametrize(
    ("hard", "most"),
    [(64, 32), (300, 150), (1024, 768), (10**6, 16_128), (resource.RLIM_INFINITY, 16_128)],
)
def test_there_are_always_fewer_connections_than_files(monkeypatch, hard, most):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert connection_limit() == most
    assert all(files > most for files, _ in asked)
