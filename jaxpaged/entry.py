"""From the shell to a command's `main`. Imports nothing heavy, so that Ctrl-C is heard at once."""

import signal
import sys
from importlib import import_module
from typing import Any

INTERRUPTED = 130


def run(module: str, prog: str, /, *arguments: Any, **keywords: Any) -> int:
    """Import a module, call its `main`, and return its exit code; 130 after Ctrl-C.

    An import that is broken off ends in errors of any kind, so that meanwhile the signal ends the
    process as it ends others, without a word.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main = import_module(module).main
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return main(*arguments, **keywords)
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return INTERRUPTED
