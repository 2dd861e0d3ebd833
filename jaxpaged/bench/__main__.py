"""`python -m jaxpaged.bench NAME`: the same as `jaxpaged bench NAME`."""

import sys

from jaxpaged.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
