"""`jaxpaged bench NAME`: which measurement, and where its lines go."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpaged.bench import latency, peer, startup, step, throughput
from jaxpaged.bench.report import Report
from jaxpaged.config.flags import ArgumentParser
from jaxpaged.config.settings import CacheSettings
from jaxpaged.engine.memory import limit_device_memory
from jaxpaged.errors import ConfigError, JaxPagedError, WeightsError

COMMANDS = {
    "step": step,
    "throughput": throughput,
    "latency": latency,
    "startup": startup,
    "peer": peer,
}
LEAVE_DEVICE_ALONE = ("startup", "peer")  # their children need it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark: 0, or 1 if it failed, 2 with one line for a setting that cannot work."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = ArgumentParser(prog="jaxpaged bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, parser_class=ArgumentParser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, description=module.__doc__)
        command.add_argument(
            "--json", type=Path, default=None, help="append the lines to this file"
        )
        module.add_arguments(command)
    args = parser.parse_args(words)
    report, code = Report(sys.stdout, args.json), 0
    try:
        share = getattr(args, "cache.gpu_memory_utilization", CacheSettings.gpu_memory_utilization)
        limit_device_memory(share)  # before the header opens the device
        report.header(
            shlex.join(["jaxpaged", "bench", *words]),
            opens_device=args.name not in LEAVE_DEVICE_ALONE,
        )
        COMMANDS[args.name].run(args, report)
    except JaxPagedError as error:
        sys.stderr.write(f"jaxpaged bench: {error}\n")
        code = 2 if isinstance(error, ConfigError | WeightsError) else 1
    report.table()
    return code
