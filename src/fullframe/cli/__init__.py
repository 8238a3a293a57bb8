"""The command line: each command parses, calls and prints; nothing is computed here and no torch loaded to parse."""

import os
import sys


def main() -> None:
    """The `fullframe` command; leaves by SystemExit."""
    from fullframe.cli.application import run

    code = run(sys.argv[1:])
    if code and "RANK" in os.environ:
        # A rank that stops in the middle of a step has threads that wait for other ranks; to unwind them aborts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
