"""What the flags say about the server; and a file that holds flags."""

import argparse
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from aiohttp.typedefs import Middleware

from jaxpaged.config.flags import ArgumentParser, embedding_config
from jaxpaged.config.settings import EngineConfig
from jaxpaged.errors import ConfigError
from server.auth import ApiKey, parse_key_line
from server.certificates import Certificates
from server.fingerprint import FingerprintMode
from server.listener import connection_limit
from server.own_middleware import own_middleware
from server.state import ServerLimits


@dataclass(frozen=True)
class ServerSettings:
    """Where to listen, for whom, and how. Times in seconds."""

    host: str
    port: int
    uds: str | None
    api_keys: tuple[ApiKey, ...]
    certificates: Certificates | None
    limits: ServerLimits
    log_level: str
    engine_process: bool = True  # the engine in a process of its own, else in a thread
    metrics_port: int | None = None
    warmup_file: Path | None = None
    embedding: EngineConfig | None = None  # of a second model
    middlewares: tuple[Middleware, ...] = ()  # the operator's own
    fingerprint: tuple[FingerprintMode, str] = ("full", "")
    logs_rates: bool = True  # one line a minute in which there was something to tell
    refreshes_certificates: bool = False


def parse(parser: ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read flags; those of `--config FILE` come first, so that the command line wins."""
    found = _config_file(argv)
    args = parser.parse_args([*(flags_from_file(Path(found)) if found else ()), *argv])
    if args.model_path is not None:
        _check_model(parser, args.model_path, argv)
        setattr(args, "model.model", args.model_path)
    if not getattr(args, "model.model", ""):
        parser.error("which model? Give a directory, a GGUF file or a hub id")
    return args


def _check_model(parser: ArgumentParser, model: str, argv: Sequence[str]) -> None:
    """Refuse what argparse took for the model although it was meant otherwise."""
    if model.startswith("-"):  # a flag that is none, whose value has a blank
        parser.error(f"unrecognized arguments: {model}")
    if any(word.partition("=")[0] == "--model" for word in argv):
        parser.error(
            f"the model is named by --model and once more as {model!r}: leave one out; several "
            "values of a flag are written with commas"
        )


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """What the parsed flags say about the server.

    Raises:
        ConfigError: a file that cannot be read, or flags that do not go together.
    """
    _check(args)
    keys = [*map(ApiKey.of, args.api_key), *_keys_from_file(args.api_key_file)]
    watchdog = args.watchdog_timeout
    limits = ServerLimits(
        max_request_bytes=args.max_request_bytes,
        max_connections=connection_limit(),
        shutdown_timeout_s=args.shutdown_timeout,
        stall_timeout_s=args.stall_timeout,
        watchdog_timeout_s=2 * args.stall_timeout if watchdog is None else watchdog,
        startup_timeout_s=args.startup_timeout,
        requests_per_minute=args.max_requests_per_minute,
        tokens_per_minute=args.max_tokens_per_minute,
        allowed_origins=args.allowed_origins,
        root_path=args.root_path,
        profile_dir=args.profile_dir,
        has_ui=args.ui,
        is_logging_access=not args.disable_access_log,
        unlogged_paths=frozenset(args.disable_access_log_for_endpoints),
        warm_prefix_share=args.max_warm_prefix_share,
        stream_interval=args.stream_interval,
        sse_keep_alive_s=args.sse_keep_alive_interval,
        forces_usage=args.enable_force_include_usage,
        tells_times=args.enable_per_request_metrics,
        names_requests=args.enable_request_id_headers,
        batch_dir=args.batch_dir,
        max_batch_file_bytes=args.max_batch_file_bytes,
        max_batch_key_bytes=args.max_batch_key_bytes,
        max_batch_inflight=args.max_batch_inflight,
        is_logging_requests=args.enable_log_requests,
        max_log_len=args.max_log_len,
        tells_tokenizer=args.enable_tokenizer_info_endpoint,
    )
    return ServerSettings(
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_keys=tuple(keys),
        certificates=_certificates(args),
        limits=limits,
        log_level=args.log_level,
        engine_process=not args.disable_frontend_multiprocessing,
        metrics_port=args.metrics_port,
        warmup_file=None if args.warmup_file is None else Path(args.warmup_file),
        embedding=embedding_config(args),
        middlewares=tuple(map(own_middleware, args.middleware)),
        fingerprint=_fingerprint(args),
        logs_rates=not args.disable_log_stats,
        refreshes_certificates=args.enable_ssl_refresh,
    )


def _fingerprint(args: argparse.Namespace) -> tuple[FingerprintMode, str]:
    if (args.fingerprint_mode == "custom") != bool(args.fingerprint_value):
        raise ConfigError(
            "--fingerprint-mode custom and --fingerprint-value go together: give both or neither"
        )
    return args.fingerprint_mode, args.fingerprint_value


def _check_ports(args: argparse.Namespace) -> None:
    for name in ("port", "metrics_port"):
        port = getattr(args, name)
        if port is not None and not 0 <= port < 2**16:
            raise ConfigError(f"--{name.replace('_', '-')} is {port}, allowed are 0 to {2**16 - 1}")
    if args.metrics_port and args.metrics_port == args.port and args.uds is None:
        raise ConfigError(f"--metrics-port and --port are both {args.port}: give two ports")


def _check(args: argparse.Namespace) -> None:
    _check_ports(args)
    for name in (
        "max_requests_per_minute", "max_tokens_per_minute", "max_request_bytes",
        "max_batch_file_bytes", "max_batch_key_bytes", "max_batch_inflight", "stream_interval",
        "max_log_len",
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    for name in ("stall_timeout", "watchdog_timeout", "startup_timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, it must be more than 0")
    for name in ("shutdown_timeout", "sse_keep_alive_interval"):
        if not 0 <= getattr(args, name) < 1e9:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, it must be 0 or more"
            )
    if args.root_path and not args.root_path.startswith("/"):
        raise ConfigError(f"--root-path is {args.root_path!r}, it must begin with /")
    if args.warmup_file is not None and not Path(args.warmup_file).is_file():
        raise ConfigError(f"--warmup-file {args.warmup_file} is no file")
    if not all(args.api_key):
        raise ConfigError("--api-key is empty: leave it out to serve without keys")


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
        if name in ("api-key", "middleware"):
            return [f"--{name}={item}" for item in items]
        return [f"--{name}={','.join(items)}"]
    return [] if value is None else [f"--{name}={value}"]


def _config_file(argv: Sequence[str]) -> str | None:
    for place, word in enumerate(argv):
        if word == "--config" and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None


def _keys_from_file(name: str | None) -> list[ApiKey]:
    if name is None:
        return []
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        raise ConfigError("--api-key-file cannot be read") from None
    keys = [
        parse_key_line(line.strip(), f"--api-key-file line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    if not keys:
        raise ConfigError("--api-key-file holds no key")
    return keys


def _certificates(args: argparse.Namespace) -> Certificates | None:
    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "enable_ssl_refresh"):
            if getattr(args, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        return None
    mode = ssl.VerifyMode(args.ssl_cert_reqs)
    found = Certificates(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs, mode)
    found.context()  # refused at once where they cannot be used
    return found
