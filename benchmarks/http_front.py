"""What a streamed token costs the host: the whole server over a device that takes no time.

    python -m benchmarks.http_front [--streams 256] [--tokens 200] [--step-ms 0] [--thread]

A client in a process of its own opens the streams. Printed are the tokens a second that came of it,
the CPU time of the front for a chunk and of the engine for a step. The engine is in a process of
its own as the server has it, or with --thread in a thread of the front's.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import socket
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.host_loop import MAX_LEN, InstantDevice, make_llm
from jaxpaged.config.settings import EngineConfig, ModelSettings, SchedulerSettings
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.inputs import InputProcessor
from jaxpaged.engine.remote import RemoteLLM
from jaxpaged.engine.served import ServedEngine
from jaxpaged.engine.wire import Start
from jaxpaged.engine.worker import main as worker_main
from jaxpaged.text.tokenizer import load_tokenizer
from server.app import create_app
from server.listener import Listener
from tests.support.fake_engine import parts_without_device
from tests.support.models import VOCAB, write_model


async def client(port: int, streams: int, tokens: int) -> tuple[int, float]:
    """Open all streams at once over raw sockets; returns chunks and seconds."""
    ask = {"prompt": [5] * 128, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(ask | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        chunks, rest = 0, b""
        while True:
            data = await reader.read(65536)
            chunks += data.count(b"data: ")
            rest = (rest + data)[-32:]
            if not data or b"[DONE]" in rest:
                writer.close()
                return chunks

    begun = time.monotonic()
    counts = await asyncio.gather(*[one() for _ in range(streams)])
    return sum(counts), time.monotonic() - begun


def client_process(pipe, port: int, streams: int, tokens: int) -> None:
    pipe.send(asyncio.run(client(port, streams, tokens)))


def make_engine(start: Start) -> AsyncLLM:
    """The real engine over an instant device; a step's time comes in `generation_config`."""
    settings = start.config
    rows, step_s = settings.scheduler.max_num_seqs, float(settings.model.generation_config)
    assert rows is not None
    tokenizer = load_tokenizer(settings.model.model)
    llm = make_llm(rows, tokenizer, VOCAB)
    runner = llm.parts.engine.runner
    runner.close = lambda: None
    if step_s:
        _slow_down(runner, step_s)
    inputs = InputProcessor(tokenizer, VOCAB, MAX_LEN, 0, ())
    return AsyncLLM(parts_without_device(llm.parts.engine, inputs, settings))


def _slow_down(runner: InstantDevice, step_s: float) -> None:
    """A device that takes `step_s` a step, one after the other."""
    read, free_at = runner.read, [0.0]

    def slow_read(pending):
        now = time.monotonic()
        free_at[0] = max(free_at[0] + step_s, now)
        time.sleep(max(0.0, free_at[0] - now))
        return read(pending)

    runner.read = slow_read


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def start_engine(folder: Path, args: argparse.Namespace) -> ServedEngine:
    config = EngineConfig(
        model=ModelSettings(model=str(folder), generation_config=str(args.step_ms / 1e3)),
        scheduler=SchedulerSettings(max_num_seqs=args.streams),
    )
    if args.thread:
        return make_engine(Start(config, "warning", False))
    return await RemoteLLM.start(config, log_level="warning", module="benchmarks.http_front")


async def measure(folder: Path, args: argparse.Namespace) -> None:
    llm = await start_engine(folder, args)
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener = await Listener.start(create_app(llm), listening)
    port, context = listening.getsockname()[1], multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=client_process, args=(theirs, port, args.streams, args.tokens))
    process.start()
    theirs.close()
    while not (llm.load.num_running or ours.poll()):
        await asyncio.sleep(0.001)
    engine_pid = os.getpid() if args.thread else llm._process.pid
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    loop_cpu, engine_cpu = time.thread_time(), cpu_seconds(engine_pid)
    chunks, seconds = await asyncio.to_thread(ours.recv)
    loop_cpu, engine_cpu = time.thread_time() - loop_cpu, cpu_seconds(engine_pid) - engine_cpu
    profile.disable()
    await asyncio.to_thread(process.join)
    process.close()
    ours.close()
    await listener.close()
    await asyncio.to_thread(llm.close)
    engine_cpu -= loop_cpu if args.thread else 0
    print(
        f"{args.streams} streams: {args.streams * args.tokens / seconds:.0f} tok/s; front "
        f"{1e6 * loop_cpu / chunks:.1f} us a chunk; engine {1e3 * engine_cpu / args.tokens:.2f} ms "
        "a step"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of the device for a step")
    parser.add_argument("--thread", action="store_true", help="the engine in a thread")
    parser.add_argument("--profile", action="store_true", help="of the event loop")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(write_model("S", Path(folder)), parser.parse_args()))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdigit():
        sys.exit(worker_main(make_engine))
    main()
