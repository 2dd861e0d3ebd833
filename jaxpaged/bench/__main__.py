"""`python -m jaxpaged.bench NAME`: the same as `jaxpaged bench NAME`."""

import sys

from jaxpaged.entry import run

if __name__ == "__main__":
    sys.exit(run("jaxpaged.bench.command", "jaxpaged bench"))
