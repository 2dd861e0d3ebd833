"""The server's own flags, beside the engine's; and a file that holds flags."""

import argparse
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from jaxpaged.config.flags import ArgumentParser, add_engine_flags, whole_number
from jaxpaged.errors import ConfigError
from server.state import ServerLimits

_LIMITS = ServerLimits()


@dataclass(frozen=True)
class ServerSettings:
    """Where to listen, for whom, and how long to wait. Times in seconds."""

    host: str
    port: int
    uds: str | None
    api_keys: tuple[str, ...]
    ssl_context: ssl.SSLContext | None
    limits: ServerLimits
    log_level: str
    engine_process: bool = True  # the engine in a process of its own, else in a thread


def make_parser(prog: str) -> ArgumentParser:
    """Flags of the engine and of the server; the model may stand without its flag."""
    parser = ArgumentParser(
        prog=prog, description="Serve a model through OpenAI's API.", allow_abbrev=False
    )
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags without their dashes")
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    group.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="may be given several times"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="one key a line")
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="the certificate's private key")
    group.add_argument(
        "--max-request-bytes",
        type=whole_number,
        default=_LIMITS.max_request_bytes,
        help="largest body of a request (default: 32M)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=_LIMITS.shutdown_timeout_s,
        metavar="SECONDS",
        help="for running requests to end after SIGTERM (default: 30)",
    )
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=_LIMITS.stall_timeout_s,
        metavar="SECONDS",
        help="without a step while work waits, before /health says 503 (default: 60)",
    )
    group.add_argument(
        "--max-requests-per-minute",
        type=whole_number,
        metavar="NUMBER",
        help="of each API key, or of all clients where there are no keys; over it a 429",
    )
    group.add_argument(
        "--max-tokens-per-minute",
        type=whole_number,
        metavar="NUMBER",
        help="prompt and output together, likewise",
    )
    group.add_argument(
        "--disable-frontend-multiprocessing",
        action="store_true",
        help="run the engine in a thread of the server instead of a process of its own",
    )
    group.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read flags; those of `--config FILE` come first, so that the command line wins."""
    found = _config_file(argv)
    args = parser.parse_args([*(flags_from_file(Path(found)) if found else ()), *argv])
    if args.model_path is not None:
        setattr(args, "model.model", args.model_path)
    if not getattr(args, "model.model", ""):
        parser.error("which model? Give a directory, a GGUF file or a hub id")
    return args


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """What the parsed flags say about the server.

    Raises:
        ConfigError: a file that cannot be read, or flags that do not go together.
    """
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port is {args.port}, allowed are 0 to {2**16 - 1}")
    for name in ("max_requests_per_minute", "max_tokens_per_minute", "max_request_bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    keys = [*args.api_key, *_keys_from_file(args.api_key_file)]
    if any(not key.strip() for key in keys):
        raise ConfigError("--api-key is empty: leave it out to serve without keys")
    limits = ServerLimits(
        max_request_bytes=args.max_request_bytes,
        shutdown_timeout_s=args.shutdown_timeout,
        stall_timeout_s=args.stall_timeout,
        requests_per_minute=args.max_requests_per_minute,
        tokens_per_minute=args.max_tokens_per_minute,
    )
    return ServerSettings(
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_keys=tuple(keys),
        ssl_context=_ssl_context(args.ssl_certfile, args.ssl_keyfile),
        limits=limits,
        log_level=args.log_level,
        engine_process=not args.disable_frontend_multiprocessing,
    )


def flags_from_file(file: Path) -> list[str]:
    """The flags that a YAML file spells without dashes: `max-model-len: 2048`.

    Raises:
        ConfigError: no YAML, or no mapping of names to values.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:150]
        raise ConfigError(f"--config {file.name} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file.name} must hold flags as 'name: value'")
    flags: list[str] = []
    for name, value in cast("dict[Any, Any]", content).items():
        flags += _flag(str(name).replace("_", "-"), value)
    return flags


def _flag(name: str, value: Any) -> list[str]:
    if name == "model":
        return [f"--model={value}"]
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}={json.dumps(value)}"]
    if isinstance(value, list):
        items = [str(item) for item in cast("list[Any]", value)]
        if name == "api-key":
            return [f"--api-key={item}" for item in items]
        return [f"--{name}={','.join(items)}"]
    return [] if value is None else [f"--{name}={value}"]


def _config_file(argv: Sequence[str]) -> str | None:
    for place, word in enumerate(argv):
        if word == "--config" and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None


def _keys_from_file(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        raise ConfigError("--api-key-file cannot be read") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError("--api-key-file holds no key")
    return keys


def _ssl_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from None
    return context
