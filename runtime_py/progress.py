"""How far a long command is."""

import sys


def say(line: str) -> None:
    """To stderr, where somebody watches: in a file or a pipe it would be no part of what was asked for."""
    if sys.stderr and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
