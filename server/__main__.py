import sys

from server.command import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m server"))
