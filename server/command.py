"""`python -m server MODEL` and `jaxpaged serve MODEL`."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpaged.config.flags import config_from_args
from jaxpaged.errors import ConfigError, JaxPagedError
from server.app import create_app
from server.serving import bind, close_engine, serve
from server.settings import make_parser, parse, server_settings

EXIT_SETTINGS = 2


def main(argv: Sequence[str] | None = None, prog: str = "jaxpaged serve") -> int:
    """Load the model, serve it, and return the exit code: 2 for a setting that cannot work."""
    try:
        return _run(sys.argv[1:] if argv is None else argv, prog)
    except JaxPagedError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_SETTINGS


def _run(argv: Sequence[str], prog: str) -> int:
    args = parse(make_parser(prog), argv)
    config, settings = config_from_args(args), server_settings(args)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every device it lacks
    try:
        listening = bind(settings)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(f"{where} cannot be listened on: {error.strerror}") from None
    from jaxpaged.engine.async_engine import AsyncLLM  # brings JAX, which takes seconds

    with listening:
        llm = AsyncLLM.from_config(config, show_progress=sys.stderr.isatty())
        app = create_app(llm, settings.api_keys, settings.limits)
        code = asyncio.run(serve(app, listening, settings))
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)
    if not close_engine(llm):
        logging.shutdown()
        os._exit(code)  # a thread that never returns would hold the process
    return code
