"""The command `jaxpaged`: one word, and the rest for the module that it names."""

import difflib
import sys
from collections.abc import Sequence

from jaxpaged import __version__
from jaxpaged.entry import run

# word -> (module, what it does); a module's `main` takes the other arguments, gives the exit code
COMMANDS = {
    "serve": ("server.command", "serve a model through OpenAI's API"),
    "generate": ("jaxpaged.generate.command", "continue prompts, or answer a batch file"),
    "replay": ("jaxpaged.replay", "plan a recorded run again and compare"),
    "plan": ("jaxpaged.plan", "say what fits on a device before it is loaded"),
    "convert": ("jaxpaged.convert", "write a model as a checkpoint that loads faster"),
    "env": ("jaxpaged.env", "say what is here: versions, devices, links, settings"),
    "bench": ("jaxpaged.bench.command", "measure throughput, latency and start-up"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 2 for a word that is none."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0
    word, rest = words[0], words[1:]
    if word in ("version", "--version"):
        sys.stdout.write(f"{__version__}\n")
        return 0
    if word not in COMMANDS:
        near = difflib.get_close_matches(word, [*COMMANDS, "version"], 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        sys.stderr.write(f"jaxpaged: there is no command {word!r}{hint}\n{_usage()}")
        return 2
    return run(COMMANDS[word][0], f"jaxpaged {word}", rest)


def _usage() -> str:
    lines = [f"  jaxpaged {word:10}{what}" for word, (_, what) in COMMANDS.items()]
    return "\n".join(["usage:", *lines, f"  jaxpaged {'version':10}print the version", ""])


if __name__ == "__main__":
    sys.exit(main())
