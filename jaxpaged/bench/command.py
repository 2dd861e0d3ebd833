"""`jaxpaged bench {step,throughput,startup}`: which measurement, and where its lines go."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpaged.bench import startup, step, throughput
from jaxpaged.bench.report import Report
from jaxpaged.config.flags import ArgumentParser
from jaxpaged.errors import ConfigError, JaxPagedError

COMMANDS = {"step": step, "throughput": throughput, "startup": startup}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Exit code 0, or 2 with one line for a setting that cannot work."""
    parser = ArgumentParser(prog="jaxpaged bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, parser_class=ArgumentParser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, description=module.__doc__)
        command.add_argument(
            "--json", type=Path, default=None, help="append the lines to this file"
        )
        module.add_arguments(command)
    args = parser.parse_args(argv)
    report = Report(sys.stdout, args.json)
    try:
        if args.name != "startup":  # whose children need the device
            report.header()
        COMMANDS[args.name].run(args, report)
    except JaxPagedError as error:
        sys.stderr.write(f"jaxpaged bench: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    report.table()
    return 0
