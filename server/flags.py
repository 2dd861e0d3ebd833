"""The server's own flags, beside the engine's."""

import argparse
import json
from typing import Any, cast

from jaxpaged.config.flags import (
    ArgumentParser,
    add_embedding_flags,
    add_engine_flags,
    whole_number,
)
from server.state import UNLOGGED_PATHS, ServerLimits

_LIMITS = ServerLimits()


def make_parser(prog: str) -> ArgumentParser:
    """Flags of the engine and of the server; the model may stand without its flag."""
    parser = ArgumentParser(
        prog=prog, description="Serve a model through OpenAI's API.", allow_abbrev=False
    )
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags without their dashes")
    add_engine_flags(parser)
    add_embedding_flags(parser)
    _add_address(parser)
    _add_access(parser)
    _add_operations(parser)
    _add_batches(parser)
    _add_answers(parser)
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("address")
    group.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    group.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics here too, without a key: keep it inside the cluster",
    )
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="prefix under which a proxy shows this server; answered with and without it",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="the certificate's private key")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="who may sign clients' certificates")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="clients' certificates: 0 none, 1 optional, 2 required (default: 0)",
    )
    _add_switch(group, "--enable-ssl-refresh", "read these files again where they change")


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="may be given several times"
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="one key a line, or name:key:role:requests=NUMBER,tokens=NUMBER with the roles user, "
        "monitor and admin, and limits a minute",
    )
    group.add_argument(
        "--middleware",
        action="append",
        default=[],
        metavar="MODULE.NAME",
        help="a coroutine function of your own (request, handler) round every request, before the "
        "key is checked; may be given several times",
    )
    _add_switch(
        group, "--ui", "the web page at /: chat, and a picture of the engine (default: on)", True
    )
    group.add_argument(
        "--allowed-origins",
        type=_names,
        default=(),
        metavar="A,B,...",
        help="origins of pages that may call, as JSON or with commas; * for any (default: none)",
    )
    for kind in ("requests", "tokens"):
        group.add_argument(
            f"--max-{kind}-per-minute",
            type=whole_number,
            metavar="NUMBER",
            help=f"{kind} of all clients together, over it a 429; keys may have their own in "
            "--api-key-file",
        )
    group.add_argument(
        "--max-warm-prefix-share",
        type=_share,
        default=_LIMITS.warm_prefix_share,
        metavar="0..1",
        help="what one key of the role user may pin of the pages that may be pinned at all "
        "(default: 0.25)",
    )
    group.add_argument(
        "--max-request-bytes",
        type=whole_number,
        default=_LIMITS.max_request_bytes,
        help="largest body of a request (default: 32M)",
    )


def _add_operations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("operations")
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
        "--watchdog-timeout",
        type=float,
        metavar="SECONDS",
        help="likewise, before all stacks are written and the server ends with code 1 "
        "(default: twice --stall-timeout)",
    )
    group.add_argument(
        "--startup-timeout",
        type=float,
        default=_LIMITS.startup_timeout_s,
        metavar="SECONDS",
        help="for an engine's process to be ready, a replica that is started again too, before "
        "its stacks are written and it is ended (default: 3600)",
    )
    group.add_argument(
        "--warmup-file",
        metavar="FILE",
        help="JSON lines with prompt or messages, answered before the server is ready",
    )
    group.add_argument("--profile-dir", metavar="DIR", help="where /start_profile writes traces")
    _add_switch(
        group,
        "--disable-frontend-multiprocessing",
        "run the engine in a thread of the server instead of a process of its own",
    )
    group.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    _add_switch(group, "--disable-log-stats", "no line a minute with the rates of tokens")
    _add_switch(
        group,
        "--enable-log-requests",
        "a line for what goes to the engine: its parameters, with --log-level debug its prompts",
    )
    group.add_argument(
        "--max-log-len",
        type=whole_number,
        metavar="NUMBER",
        help="most characters, and token ids, of a prompt in such a line (default: all)",
    )
    _add_switch(group, "--disable-access-log", "no line a request")
    group.add_argument(
        "--disable-access-log-for-endpoints",
        type=_names,
        default=tuple(sorted(UNLOGGED_PATHS)),
        metavar="A,B,...",
        help=f"paths without such a line (default: {', '.join(sorted(UNLOGGED_PATHS))})",
    )


def _add_batches(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches")
    group.add_argument(
        "--batch-dir",
        metavar="DIR",
        help="serve /v1/files and /v1/batches, and keep them here; on a disk of this machine",
    )
    group.add_argument(
        "--max-batch-file-bytes",
        type=whole_number,
        default=_LIMITS.max_batch_file_bytes,
        help="largest file (default: 200M)",
    )
    group.add_argument(
        "--max-batch-key-bytes",
        type=whole_number,
        default=_LIMITS.max_batch_key_bytes,
        help="most that the files of one key take together (default: 10G)",
    )
    group.add_argument(
        "--max-batch-inflight",
        type=whole_number,
        metavar="LINES",
        help="lines of batches in the engine at a time (default: 3/4 of --max-num-seqs, times the "
        "replicas)",
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    _add_switch(group, "--enable-force-include-usage", "usage at the end of every stream")
    _add_switch(
        group,
        "--enable-per-request-metrics",
        "metrics in answers: their times, and tokens a second (default: on)",
        True,
    )
    group.add_argument(
        "--stream-interval",
        type=whole_number,
        default=_LIMITS.stream_interval,
        metavar="TOKENS",
        help="tokens a chunk of a stream, but for the first (default: 1)",
    )
    group.add_argument(
        "--fingerprint-mode",
        choices=("full", "hash", "custom", "none"),
        default="full",
        help="system_fingerprint of answers: version, parallel sizes and a hash of the settings; "
        "hash: without the sizes; custom: --fingerprint-value (default: full)",
    )
    group.add_argument("--fingerprint-value", default="", metavar="TEXT")
    _add_switch(
        group,
        "--enable-request-id-headers",
        "X-Request-Id in every answer, also where the client sent none",
    )
    _add_switch(
        group,
        "--enable-tokenizer-info-endpoint",
        "serve /tokenizer_info: special tokens and the chat template",
    )
    for name in ("prompt-tokens-details", "server-load-tracking", "sleep-mode"):
        _add_switch(group, f"--enable-{name}", "known; it is always on")
    group.add_argument(
        "--sse-keep-alive-interval",
        type=float,
        default=_LIMITS.sse_keep_alive_s,
        metavar="SECONDS",
        help="send a comment where a stream would be silent for so long, the first token included: "
        "for proxies that cut idle connections (default: 0, never)",
    )


def _add_switch(
    group: argparse._ArgumentGroup,  # pyright: ignore[reportPrivateUsage]
    flag: str,
    help: str,
    default: bool = False,
) -> None:
    """A flag that its `--no-` takes back, which is what a file of flags says with `false`."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=help)


def _names(text: str) -> tuple[str, ...]:
    """A JSON list, or names with commas between them."""
    if text.lstrip().startswith("["):
        return tuple(str(item) for item in cast("list[Any]", json.loads(text)))
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError("not from 0 to 1")
    return share


_names.__name__ = "list of names"
_share.__name__ = "number from 0 to 1"
