"""`python -m jaxpaged.generate --model M --input IN.jsonl --output OUT.jsonl`."""

import sys

from jaxpaged.generate.command import main

if __name__ == "__main__":
    sys.exit(main())
