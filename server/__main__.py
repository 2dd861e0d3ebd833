import sys

from jaxpaged.entry import run

if __name__ == "__main__":
    sys.exit(run("server.command", "python -m server", prog="python -m server"))
