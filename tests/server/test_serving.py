"""A server's life: it drains on a signal, ends when its engine does, and refuses bad settings."""

import asyncio
import dataclasses
import os
import re
import signal
import socket
import time
from pathlib import Path

import aiohttp
import pytest

from jaxpaged import __version__, cli
from jaxpaged.config.flags import config_from_args
from jaxpaged.errors import ConfigError
from server import command, state
from server.app import create_app
from server.auth import ApiKey
from server.errors import HttpError
from server.fingerprint import system_fingerprint
from server.flags import make_parser
from server.listener import Listener
from server.serving import EXIT_DONE, EXIT_ENGINE_STOPPED, bind, close_engine, serve
from server.settings import ServerSettings, flags_from_file, parse, server_settings
from server.state import ServerLimits
from tests.server.conftest import COMPLETIONS, Running
from tests.server.test_protocol import until
from tests.server.test_slow_clients import connect, post
from tests.support.fake_engine import fake_llm
from tests.support.models import write_model

STREAM = {"prompt": "ABC", "max_tokens": 80, "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture
async def life(tmp_path: Path):
    """A running `serve`, and the task that gives its exit code."""
    tasks, sessions, llms = [], [], []

    async def begin(shutdown_timeout_s: float = 10.0) -> tuple[Running, asyncio.Task[int]]:
        llm, engine = fake_llm(tmp_path)
        engine.before_step = lambda step: time.sleep(0.002)
        limits = ServerLimits(shutdown_timeout_s=shutdown_timeout_s)
        settings = ServerSettings("127.0.0.1", 0, None, (), None, limits, "info")
        app, listening = create_app(llm, (), limits), bind(settings)
        task = asyncio.create_task(serve(app, listening, settings))
        session = aiohttp.ClientSession()
        tasks.append(task), sessions.append(session), llms.append(llm)
        running = Running(
            llm, engine, app, f"http://127.0.0.1:{listening.getsockname()[1]}", session
        )
        async with asyncio.timeout(10):
            while not task.done():
                try:
                    await running.get("/health")
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)
        return running, task

    yield begin
    for session in sessions:
        await session.close()
    for llm in llms:
        assert close_engine(llm)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)


async def working(running: Running, steps: int = 3) -> None:
    async with asyncio.timeout(10):
        while running.engine.num_steps < steps:
            await asyncio.sleep(0.005)


async def test_a_signal_lets_streams_finish_and_ends_with_0(life):
    running, task = await life()
    stream = asyncio.create_task(running.post(STREAM))
    await working(running)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    async with aiohttp.ClientSession() as session:  # connections that come now are answered too
        late = dataclasses.replace(running, session=session)
        refused, health = await late.post(STREAM), await late.get("/health")
        assert (refused.status, health.status, health.body) == (503, 503, {"status": "draining"})
        assert int(refused.headers["retry-after"]) >= 1
        assert (await late.get("/health/live")).status == 200
    reply = await stream
    assert len("".join(reply.texts)) == 80
    assert await asyncio.wait_for(task, 10) == EXIT_DONE
    with pytest.raises(aiohttp.ClientError):
        await running.get("/health")


async def test_a_stream_that_cannot_end_in_time_is_told_so(life):
    running, task = await life(shutdown_timeout_s=0.2)
    stream = asyncio.create_task(running.post(STREAM | {"max_tokens": 1900}))
    await working(running)
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    reply = await stream
    assert "shut down" in reply.events[-1]["error"]["message"]
    assert await asyncio.wait_for(task, 10) == EXIT_DONE
    assert 0.15 < time.monotonic() - begun < 0.2 + 2


async def test_a_body_that_does_not_come_does_not_hold_up_the_end(life, monkeypatch):
    monkeypatch.setattr(state, "LATE_BODY_S", 0.3)
    running, task = await life(shutdown_timeout_s=60)
    stuck, writer = await connect(running)
    coming, late = await connect(running)
    whole = post(COMPLETIONS, {"prompt": "ABC", "max_tokens": 3, "temperature": 0})
    for half in (writer, late):
        half.write(whole[:-5])
    await until(lambda: running.state.num_working == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: running.state.is_draining)
    late.write(whole[-5:])
    assert b"DEF" in await asyncio.wait_for(coming.readuntil(b"usage"), 10)
    answer = await asyncio.wait_for(stuck.readuntil(b"}"), 10)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"shutting down" in answer
    assert await asyncio.wait_for(task, 10) == EXIT_DONE
    for each in (writer, late):
        each.close()


async def test_a_second_signal_ends_it_at_once(life):
    running, task = await life(shutdown_timeout_s=60)
    stream = asyncio.create_task(running.post(STREAM | {"max_tokens": 1900}))
    await working(running)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    assert "shut down" in (await stream).events[-1]["error"]["message"]
    assert await asyncio.wait_for(task, 5) == EXIT_DONE


async def test_a_hangup_that_is_ignored_stays_so(life):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running, task = await life()
        os.kill(os.getpid(), signal.SIGHUP)
        assert len("".join((await running.post(STREAM)).texts)) == 80
        assert (await running.get("/health")).status == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 5) == EXIT_DONE
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_an_idle_server_ends_at_once(life):
    _, task = await life(shutdown_timeout_s=60)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, 5) == EXIT_DONE


async def test_a_dead_engine_ends_the_server_with_1(life):
    running, task = await life()

    def die(step: int) -> None:
        raise RuntimeError("no more")

    running.engine.before_step = die
    reply = await running.post(STREAM)
    assert reply.status == 500
    assert await asyncio.wait_for(task, 5) == EXIT_ENGINE_STOPPED


async def test_a_unix_socket_is_served(tmp_path):
    llm, _ = fake_llm(tmp_path / "m")
    path = str(tmp_path / "socket")
    settings = ServerSettings("", 0, path, (), None, ServerLimits(), "info")
    task = asyncio.create_task(serve(create_app(llm), bind(settings), settings))
    async with asyncio.timeout(10):
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                try:
                    async with session.post(f"http://x{COMPLETIONS}", json=STREAM) as response:
                        assert (await response.read()).endswith(b"[DONE]\n\n")
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, 5) == EXIT_DONE
    assert close_engine(llm)


def settings_of(*argv: str) -> ServerSettings:
    return server_settings(parse(make_parser("x"), ["model", *argv]))


def test_defaults_are_vllms_where_it_has_one():
    settings = settings_of()
    assert (settings.host, settings.port, settings.api_keys) == ("0.0.0.0", 8000, ())
    assert settings.limits.shutdown_timeout_s == 30


def test_keys_come_from_flags_and_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# a comment\nthree\n\nteam:four:monitor:requests=9\n")
    settings = settings_of("--api-key", "one", "--api-key=two", f"--api-key-file={file}")
    words = ("one", "two", "three", "four")
    assert [k.digest for k in settings.api_keys] == [ApiKey.of(word).digest for word in words]
    assert [k.role for k in settings.api_keys] == ["admin", "admin", "user", "monitor"]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key-file", "missing"], "--api-key-file"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--ssl-certfile", "missing"], "--ssl-certfile"),
        (["--metrics-port", "70000"], "--metrics-port is 70000"),
        (["--port", "9000", "--metrics-port", "9000"], "are both 9000"),
        (["--root-path", "x"], "--root-path is 'x'"),
        (["--warmup-file", "missing"], "--warmup-file missing is no file"),
        (["--stall-timeout", "-1"], "--stall-timeout is -1"),
        (["--startup-timeout", "0"], "--startup-timeout is 0.0, it must be more than 0"),
        (["--watchdog-timeout", "nan"], "--watchdog-timeout is nan"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
        (["--sse-keep-alive-interval", "-1"], "--sse-keep-alive-interval is -1"),
        (["--fingerprint-mode", "custom"], "--fingerprint-value go together"),
        (["--middleware", "no_such_module.name"], "cannot be imported"),
        (["--middleware", "server.command.main"], "must be a coroutine function"),
    ],
)
def test_settings_that_cannot_work_are_named(argv, names):
    with pytest.raises(ConfigError, match=names):
        settings_of(*argv)


def test_a_fingerprint_tells_version_spread_and_settings():
    def made(*argv: str) -> str | None:
        args = parse(make_parser("x"), ["model", *argv])
        return system_fingerprint(config_from_args(args), *server_settings(args).fingerprint)

    usual = made()
    assert usual is not None
    assert re.fullmatch(rf"jaxpaged-{re.escape(__version__)}-[0-9a-f]{{8}}", usual)
    assert made("--port", "9", "--compile-cache-dir", "x") == usual
    assert made("--dtype", "float16") != usual
    assert (made("-tp=2") or "").startswith(f"jaxpaged-{__version__}-tp2-")
    assert "tp2" not in (made("-tp=2", "--fingerprint-mode", "hash") or "")
    assert made("--fingerprint-mode", "custom", "--fingerprint-value", "mine") == "mine"
    assert made("--fingerprint-mode", "none") is None


async def test_code_of_the_operators_own_sees_every_request_before_the_key(start):
    settings = settings_of(f"--middleware={__name__}.refuse_teapots")
    server = await start(("sk-1",), middlewares=settings.middlewares)
    keyed = {"Authorization": "Bearer sk-1"}
    refused = await server.get("/v1/models", headers={"X-Teapot": "1"})
    assert (refused.status, refused.error["message"]) == (418, "short and stout")
    assert (await server.get("/v1/models")).status == 401
    reply = await server.get("/v1/models", headers=keyed)
    assert (reply.status, reply.headers["x-seen"]) == (200, "yes")


async def refuse_teapots(request, handler):
    if "X-Teapot" in request.headers:
        raise HttpError(418, "short and stout")
    response = await handler(request)
    response.headers["X-Seen"] = "yes"
    return response


def test_a_file_of_flags_comes_before_the_command_line(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: from-file\nport: 1234\nmax_model_len: 100\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\nhf-overrides: {x: 1}\napi-key: [k1, k2]\nuds: null\n"
        "disable-log-stats: false\n"
    )
    assert flags_from_file(file) == [
        "--model=from-file", "--port=1234", "--max-model-len=100", "--no-enable-prefix-caching",
        "--served-model-name=a,b", '--hf-overrides={"x": 1}', "--api-key=k1", "--api-key=k2",
        "--no-disable-log-stats",
    ]  # fmt: skip
    args = parse(make_parser("x"), ["--config", str(file), "--port", "99"])
    assert (args.port, args.disable_log_stats) == (99, False)
    assert getattr(args, "model.model") == "from-file"
    assert getattr(args, "model.served_model_name") == ("a", "b")


def test_a_name_in_a_file_of_flags_that_is_no_flag_is_never_the_model(tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text("model: m\nquantization:\n  awq:\n    bits: 4\n")
    with pytest.raises(SystemExit):
        parse(make_parser("x"), ["--config", str(file)])
    assert "unrecognized arguments: --quantization=" in capsys.readouterr().err
    file.write_text("model: m\n")
    args = parse(make_parser("x"), ["--config", str(file), "other"])
    assert getattr(args, "model.model") == "other"


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\xff"])
def test_a_file_that_holds_no_flags_is_refused(tmp_path, content):
    file = tmp_path / "flags.yaml"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"--config flags\.yaml"):
        flags_from_file(file)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["m", "--max-seqs-per-bach", "3"], "did you mean --max-seqs-per-batch?"),
        (["m", "--priority-mode", "FAST"], "--priority-mode"),
        (["m", "--max-model", "3"], "--max-model"),
        ([], "which model?"),
        (["--nope=a b"], "unrecognized arguments: --nope=a b"),
        (["m", "--served-model-name", "a", "b"], "b (several values of a flag are written with"),
        (["--model", "m", "--served-model-name", "a", "b"], "by --model and once more as 'b'"),
        (["--model=m", "b"], "by --model and once more as 'b'"),
    ],
)
def test_mistakes_in_flags_are_one_line_and_code_2(capsys, argv, says):
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_an_address_in_use_is_found_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = command.main(["no-such-model", "--host", "127.0.0.1", "--port", port])
    told = capsys.readouterr().err
    assert code == 2
    assert f"127.0.0.1:{port} cannot be listened on" in told
    assert told.count("\n") == 1


def test_a_metrics_port_in_use_is_found_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--host", "127.0.0.1", "--port", "0", "--metrics-port", port]
        assert command.main(["no-such-model", *flags]) == 2
    told = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be listened on" in told
    assert told.count("\n") == 1


def test_a_socket_whose_path_is_too_long_is_told_so():
    settings = ServerSettings("", 0, "/tmp/" + "a" * 200, (), None, ServerLimits(), "info")
    with pytest.raises(ConfigError, match="cannot be listened on: AF_UNIX path too long"):
        bind(settings)


async def test_of_two_servers_that_start_together_one_is_told_that_the_address_is_taken(tmp_path):
    llm, _ = fake_llm(tmp_path)
    first = ServerSettings("127.0.0.1", 0, None, (), None, ServerLimits(), "info")
    with bind(first) as one:
        port = one.getsockname()[1]
        with bind(dataclasses.replace(first, port=port)) as other:  # as none listens yet
            listener = await Listener.start(create_app(llm), one)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on: Addr"):
                await serve(create_app(llm), other, first)
            await listener.close()
    llm.close()


def test_a_model_that_is_not_there_is_one_line_and_code_2(capsys, tmp_path):
    code = command.main([str(tmp_path / "nothing"), "--host", "127.0.0.1", "--port", "0"])
    told = capsys.readouterr().err
    assert code == 2
    assert told.count("\n") == 1
    assert "Traceback" not in told


def test_models_of_one_process_have_the_same_devices(capsys, tmp_path):
    flags = ["--port", "0", "--disable-frontend-multiprocessing", "--embedding-model", "e"]
    flags += ["--embedding-settings", '{"device_ids": [1]}']
    assert command.main([str(write_model("S", tmp_path)), *flags]) == 2
    assert "keeps both models in one process" in capsys.readouterr().err


def test_code_of_model_folders_is_refused_by_flag(capsys):
    assert command.main(["m", "--trust-remote-code"]) == 2
    assert "trust_remote_code" in capsys.readouterr().err


def test_the_command_line_knows_its_words(capsys):
    assert cli.main(["version"]) == 0
    assert cli.main(["--help"]) == 0
    assert "jaxpaged serve" in capsys.readouterr().out
    assert cli.main(["serf"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
