"""`jaxpaged bench NAME`: which measurement, and where its lines go."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from jaxpaged.bench.report import Report
from jaxpaged.config.flags import ArgumentParser
from jaxpaged.config.settings import CacheSettings
from jaxpaged.errors import ConfigError, JaxPagedError, WeightsError

COMMANDS = ("kernels", "step", "throughput", "latency", "startup", "peer", "serve")
LEAVE_DEVICE_ALONE = ("startup", "peer", "serve")  # their children need it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark: 0, or 1 if it failed, 2 with one line for a setting that cannot work."""
    words = sys.argv[1:] if argv is None else list(argv)
    names = ArgumentParser(prog="jaxpaged bench", description=__doc__)
    names.add_argument("name", choices=COMMANDS)
    name = names.parse_args(words[:1]).name
    module = import_module(f"jaxpaged.bench.{name}")  # the others may need what is not installed
    parser = ArgumentParser(prog=f"jaxpaged bench {name}", description=module.__doc__)
    parser.add_argument("--json", type=Path, default=None, help="append the lines to this file")
    module.add_arguments(parser)
    args = parser.parse_args(words[1:])
    report, code = Report(sys.stdout, args.json), 0
    try:
        if name not in LEAVE_DEVICE_ALONE:
            _limit_device_memory(args)
        report.header(
            shlex.join(["jaxpaged", "bench", *words]),
            opens_device=name not in LEAVE_DEVICE_ALONE,
        )
        module.run(args, report)
    except JaxPagedError as error:
        sys.stderr.write(f"jaxpaged bench: {error}\n")
        code = 2 if isinstance(error, ConfigError | WeightsError) else 1
    report.table()
    return code


def _limit_device_memory(args: Namespace) -> None:
    """Before the header opens the device."""
    from jaxpaged.engine.memory import limit_device_memory

    share = "cache.gpu_memory_utilization"
    limit_device_memory(getattr(args, share, CacheSettings.gpu_memory_utilization))
