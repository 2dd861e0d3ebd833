"""`python -m jaxpaged.generate --model M --input IN.jsonl --output OUT.jsonl`."""

import sys

from jaxpaged.entry import run

if __name__ == "__main__":
    sys.exit(run("jaxpaged.generate.command", "jaxpaged generate"))
