"""`jaxpaged replay run.jsonl`: every plan of a recorded run again, without a device."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpaged.config.flags import ArgumentParser
from jaxpaged.core.recording import replay
from jaxpaged.errors import JaxPagedError

EXIT_DIFFERENT, EXIT_SETTINGS = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """0 where all plans came out as recorded, 1 at the first that did not, 2 for no record."""
    parser: argparse.ArgumentParser = ArgumentParser(
        prog="jaxpaged replay", description="Plan a recorded run again and compare every plan."
    )
    parser.add_argument("record", type=Path, help="file that --record wrote")
    args = parser.parse_args(argv)
    try:
        found = replay(args.record)
    except JaxPagedError as error:
        sys.stderr.write(f"jaxpaged replay: {error}\n")
        return EXIT_SETTINGS
    text = f"{found.num_plans} plans, {found.num_preemptions} preemptions"
    if found.mismatch is None:
        sys.stdout.write(f"{text}: all as recorded\n")
        return 0
    sys.stdout.write(f"{text}: the plan of line {found.mismatch} differs from the record\n")
    return EXIT_DIFFERENT
