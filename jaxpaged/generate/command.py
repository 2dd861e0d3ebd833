"""The command line of the batch job, and its exit codes.

0 every line was answered · 1 some lines have an error record · 2 a setting or the model cannot work
· 3 the output cannot be written · 130 interrupted; what was written is whole and can be resumed.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from jaxpaged.config.flags import ArgumentParser, add_engine_flags, config_from_args
from jaxpaged.config.settings import EngineConfig
from jaxpaged.core.params import OutputKind, SamplingParams
from jaxpaged.engine.async_engine import AsyncLLM
from jaxpaged.engine.factory import build_engine
from jaxpaged.engine.replicas import ReplicaSet
from jaxpaged.engine.served import ServedEngine
from jaxpaged.errors import ConfigError, EngineStopped, JaxPagedError
from jaxpaged.generate.job import run_lines
from jaxpaged.generate.output import OutputFailed, OutputFile

FOR_LINES = ("output", "resume", "order", "max_inflight")
FOR_PROMPT = ("chat", "system", "max_tokens", "temperature", "top_p", "sampling_seed")
ANSWERED, SOME_FAILED, CANNOT_START, CANNOT_WRITE, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn what goes wrong into one line and an exit code."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except OutputFailed as error:
        sys.stderr.write(f"jaxpaged generate: output cannot be written: {error}\n")
        return CANNOT_WRITE
    except (JaxPagedError, OSError) as error:
        sys.stderr.write(f"jaxpaged generate: {error}\n")
        return SOME_FAILED if isinstance(error, EngineStopped) else CANNOT_START
    except KeyboardInterrupt:
        sys.stderr.write("jaxpaged generate: interrupted; go on with --resume\n")
        return INTERRUPTED


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="jaxpaged generate",
        description="Answer a JSONL file of requests or prompts, or one prompt.",
        epilog=(__doc__ or "").split("\n\n")[1],
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-i", "--input", help="JSONL file, or - for standard input")
    source.add_argument("--prompt", help="answer this one prompt on standard output")
    parser.add_argument("-o", "--output", help="JSONL file (default: standard output)")
    parser.add_argument("--resume", action="store_true", help="append what the output still lacks")
    parser.add_argument(
        "--order",
        choices=("input", "completion"),
        help="order of the output (default: input)",
    )
    parser.add_argument(
        "--max-inflight",
        type=int,
        help="lines at once (default: 4 times the running ones)",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    one = parser.add_argument_group("for --prompt")
    one.add_argument("--chat", action="store_true", help="put it through the chat template")
    one.add_argument("--system", help="system message, with --chat")
    one.add_argument("--max-tokens", type=int, help="(default: 256)")
    one.add_argument("--temperature", type=float, help="(default: 0)")
    one.add_argument("--top-p", type=float, help="(default: 1)")
    one.add_argument("--sampling-seed", type=int)
    add_engine_flags(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    config = config_from_args(args)
    if not config.model.model:
        sys.stderr.write(
            "jaxpaged generate: --model is missing: a directory, GGUF file or hub id\n"
        )
        return CANNOT_START
    _check_flags(args)
    output = None
    if args.prompt is None:
        path = None if args.output in (None, "-") else Path(args.output)
        _check_files(args.input, path)
        output = OutputFile(path, sys.stdout.buffer, resume=args.resume)
    return asyncio.run(_answer(config, args, output))


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would say nothing here.

    Raises:
        ConfigError: names the first.
    """
    is_one = args.prompt is not None
    for name in FOR_LINES if is_one else FOR_PROMPT:
        value = getattr(args, name)
        if value is not None and value is not False:
            flag = "--" + name.replace("_", "-")
            instead = "--input" if is_one else "--prompt; a line of --input holds its own"
            raise ConfigError(f"{flag} goes with {instead}")
    if args.system is not None and not args.chat:
        raise ConfigError("--system goes with --chat")
    if args.resume and args.output in (None, "-"):
        raise ConfigError("--resume needs the --output of the run that was cut")
    if args.max_inflight is not None and args.max_inflight < 1:
        raise ConfigError(f"--max-inflight is {args.max_inflight}, it must be at least 1")


def _check_files(given: str, output: Path | None) -> None:
    """Refuse an input that is no file or pipe, and an output that would overwrite it.

    Raises:
        ConfigError: either.
    """
    path = Path(given)
    if given != "-" and (path.is_dir() or not path.exists()):
        what = "this is a folder, not a file" if path.is_dir() else "no such file"
        raise ConfigError(f"--input {given}: {what}")
    if output is None or not output.is_file():
        return
    read = os.fstat(sys.stdin.fileno()) if given == "-" else path.stat()
    if os.path.samestat(read, output.stat()):
        raise ConfigError(
            f"--output {output} is what is read: its lines would be lost, name another file"
        )


async def _answer(config: EngineConfig, args: argparse.Namespace, output: OutputFile | None) -> int:
    if config.parallel.data_parallel_size > 1:
        engine = await ReplicaSet.start(config, log_level="warning")
    else:
        engine = AsyncLLM(build_engine(config))
    try:
        if output is None:
            return await _one_prompt(engine, args)
        return await _file(engine, args, output)
    finally:
        await asyncio.to_thread(engine.close)


async def _file(engine: AsyncLLM | ReplicaSet, args: argparse.Namespace, output: OutputFile) -> int:
    rows = (engine.config.scheduler.max_num_seqs or 1) * max(1, len(engine.replicas()))
    start = time.monotonic()
    is_piped = args.input == "-"
    source = nullcontext(sys.stdin.buffer) if is_piped else open(args.input, "rb")  # noqa: SIM115
    with source as lines:
        summary = await run_lines(
            engine,
            lines,
            output,
            max_inflight=args.max_inflight or 4 * rows,
            keep_order=args.order != "completion",
            show_progress=not args.no_progress and sys.stderr.isatty(),
        )
    output.close()
    sys.stderr.write(summary.text(time.monotonic() - start) + "\n")
    return ANSWERED if summary.are_all_answered else SOME_FAILED


async def _one_prompt(engine: ServedEngine, args: argparse.Namespace) -> int:
    """Stream one answer to standard output, and its speed to standard error."""
    params = SamplingParams(
        temperature=args.temperature or 0.0,
        top_p=1.0 if args.top_p is None else args.top_p,
        seed=args.sampling_seed,
        max_tokens=256 if args.max_tokens is None else args.max_tokens,
        output_kind=OutputKind.DELTA,
    )
    prompt = args.prompt
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        prompt = await engine.chat_prompt([*system, {"role": "user", "content": prompt}])
    _, ids = await engine.encode(prompt)
    room = engine.max_model_len - len(ids)
    params = replace(params, max_tokens=min(params.max_tokens or 0, max(1, room)))
    times: list[float] = []
    async for output in engine.generate(prompt, params):
        times += [time.monotonic()] * len(output.outputs[0].token_ids)
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if len(times) > 1:
        rate = (len(times) - 1) / (times[-1] - times[0])
        sys.stderr.write(f"{len(ids)} prompt tokens, {len(times)} answered, {rate:.1f} tokens/s\n")
    return ANSWERED
